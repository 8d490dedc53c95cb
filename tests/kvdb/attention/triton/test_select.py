"""Selection by threshold and by rank, against sorting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdb.attention.triton import select
from tests.kvdb.attention.triton.sequences import nan


def selected(scores, threshold, capacity, group, sums=None, scale=1.0):
    """ids and counts."""
    ids = torch.full((len(scores), scores.shape[1] // group, capacity), -1, dtype=torch.int32)
    counts = torch.full(ids.shape[:2], -1, dtype=torch.int32)
    select.select_pages(ids, counts, scores, threshold, group, sums, scale)
    return ids, counts


def scores_of(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_subnormal=False), min_size=1, max_size=40),
    k=st.integers(1, 40),
)
def test_the_kth_largest_is_that_of_a_sort(values, k):
    scores, out = torch.tensor(values)[None, None], nan(1, 1)
    select.kth_largest(scores, k, out)
    assert out.item() == (sorted(values, reverse=True)[k - 1] if k <= len(values) else -torch.inf)


def test_the_kth_of_many_rows_and_chunks():
    scores, out = scores_of(2, 3, 1300), nan(2, 3)
    scores[1, 2, 5:] = -torch.inf
    select.kth_largest(scores, 7, out)
    assert torch.equal(out, scores.sort(dim=2, descending=True).values[:, :, 6])
    assert out[1, 2] == -torch.inf


@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_group_takes_what_any_of_its_heads_wants(group):
    scores, threshold = scores_of(2, 6, 700), torch.full((2, 6), 2.0)
    threshold[1, :] = torch.tensor([torch.inf, 3.0, 2.0, 1.0, -torch.inf, 5.0])
    scores[:, :, 650:] = -torch.inf
    ids, counts = selected(scores, threshold, 700, group)
    wanted = ((scores >= threshold[..., None]) & (scores > -torch.inf)).unflatten(1, (-1, group)).any(2)
    for s in range(2):
        for head in range(6 // group):
            assert counts[s, head] == wanted[s, head].sum()
            assert sorted(ids[s, head, : counts[s, head]].tolist()) == wanted[s, head].nonzero()[:, 0].tolist()


def test_nothing_is_written_beyond_the_capacity():
    scores = scores_of(1, 2, 100)
    ids, counts = torch.full((2, 1, 10), -7, dtype=torch.int32), torch.zeros((2, 1), dtype=torch.int32)
    select.select_pages(ids[:1], counts[:1], scores, torch.full((1, 2), -torch.inf), 2)
    assert counts[0, 0] == 100
    assert (ids[1] == -7).all()


def test_what_is_left_out_is_summed_up():
    scores, threshold, scale = scores_of(2, 4, 600, seed=2), torch.full((2, 4), 0.5), 1.7
    sums, missed = torch.zeros(2, 4), nan(2, 4)
    ids, counts = selected(scores, threshold, 600, 2, sums, scale)
    select.log_missed_mass(threshold, counts, 600, sums, scale, 32, missed)
    for s in range(2):
        for row in range(4):
            out = torch.ones(600, dtype=torch.bool)
            out[ids[s, row // 2, : counts[s, row // 2]].long()] = False
            expected = torch.logsumexp(scale * scores[s, row, out].double(), 0) + torch.log(torch.tensor(32.0))
            assert abs(missed[s, row] - expected) < 1e-4
    assert (sums == 0).all()
    counts[0, 0] = 601
    select.log_missed_mass(threshold, counts, 600, sums, scale, 32, missed)
    assert (missed[0, :2] == -torch.inf).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="scores are"):
        selected(scores_of(1, 4, 9), nan(1, 4), 4, 3)
    with pytest.raises(ValueError, match="threshold is"):
        selected(scores_of(1, 4, 9), nan(1, 3), 4, 2)
    with pytest.raises(ValueError, match="k is 0"):
        select.kth_largest(scores_of(1, 4, 9), 0, nan(1, 4))
