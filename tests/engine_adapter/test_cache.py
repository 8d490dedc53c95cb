"""The cache follows a batch: rows that several go on from are forked, rows that none goes on from are closed."""

import pytest
import torch

import kvdb
from engine_adapter.transformers.cache import Row, SessionCache
from kvdb.errors import CapacityError, InvalidArgument, PositionError, SessionClosed, ShapeError, Unsupported
from tests.engine_adapter.tiny import prompts


@pytest.fixture
def cache(db, spec):
    """Four rows; row i holds i tokens and begins behind 3 - i columns of padding."""
    rows = []
    for i in range(4):
        session = db.create_session(spec, [])
        rows.append(Row(session, padding=3 - i, padding_end=3 - i))
        for layer in range(spec.layers):
            session.update(layer, torch.zeros(2, i, 16), torch.zeros(2, i, 16))
    with SessionCache(spec, rows, length=3, db=db) as cache:
        yield cache


def lengths(cache):
    return [session.stats().tokens for session in cache.sessions]


def test_rows_are_reordered(cache):
    cache.reorder_cache(torch.tensor([2, 0, 0, 1]))
    assert lengths(cache) == [2, 0, 0, 1]
    assert [row.padding for row in cache.rows] == [1, 3, 3, 2]
    assert len({id(session) for session in cache.sessions}) == 4


def test_no_session_is_opened_or_closed_for_an_order_that_stays(cache, engine):
    before = cache.sessions
    cache.reorder_cache(torch.arange(4))
    assert cache.sessions == before
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    assert cache.sessions == before[::-1]


def test_rows_without_a_follower_are_closed(cache, engine):
    dropped = cache.sessions[3]
    cache.reorder_cache(torch.tensor([0, 1, 2, 2]))
    with pytest.raises(SessionClosed):
        dropped.stats()
    assert len(engine.handles) == 4


def test_rows_are_repeated_and_selected(cache):
    cache.batch_repeat_interleave(2)
    assert lengths(cache) == [0, 0, 1, 1, 2, 2, 3, 3]
    cache.batch_select_indices(torch.tensor([1, 6]))
    assert lengths(cache) == [0, 3]


@pytest.mark.parametrize(
    "indices",
    [(1, 3), [1, 3], torch.tensor([1, 3]), torch.tensor([False, True, False, True]), (torch.tensor([1, 3]),), (-3, -1)],
)
def test_rows_are_selected_by_whatever_picks_rows_of_a_tensor(cache, indices):
    cache.batch_select_indices(indices)
    assert lengths(cache) == [1, 3]


def test_forks_go_on_apart(cache, spec):
    cache.batch_select_indices(torch.tensor([3, 3]))
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16)
    for layer in range(spec.layers):
        keys, values = cache.update(k, k, layer)
        out = cache.layers[layer].attend(q, keys, values, None)
    assert out.shape == (2, 1, 4, 16)
    assert lengths(cache) == [4, 4]
    assert not torch.equal(out[0], out[1])
    assert cache.get_seq_length() == 4


def test_the_rows_of_a_step_are_answered_in_one_call(cache, db, spec, monkeypatch):
    cache.batch_select_indices(torch.tensor([3, 1, 2]))
    q, k = torch.randn(3, 4, 1, 16), torch.randn(3, 2, 1, 16)
    with SessionCache(spec, [Row(row.session.fork(), row.padding) for row in cache.rows], length=3) as apart:
        one_by_one = apart.layers[0].attend(q, *apart.update(k, k, 0), None)
    monkeypatch.setattr(kvdb.Session, "attend", None)
    out = cache.layers[0].attend(q, *cache.update(k, k, 0), None)
    assert torch.allclose(out, one_by_one, atol=1e-6)


def test_a_row_that_is_elsewhere_leaves_all_rows_as_they_were(cache):
    cache.sessions[2].update(0, torch.zeros(2, 1, 16), torch.zeros(2, 1, 16))
    before = [session.stats().tail_nbytes for session in cache.sessions]
    q, k = torch.randn(4, 4, 1, 16), torch.randn(4, 2, 1, 16)
    with pytest.raises(PositionError, match=r"sessions\[2\]: start is 2, but layer 0 holds 3"):
        cache.layers[0].attend(q, *cache.update(k, k, 0), None)
    assert [session.stats().tail_nbytes for session in cache.sessions] == before


def test_a_fork_that_fails_leaves_the_rows_as_they_were(cache, engine, monkeypatch):
    fork, before = kvdb.Session.fork, cache.sessions
    forks = []

    def full(session):
        if forks:
            raise CapacityError("full")
        forks.append(fork(session))
        return forks[0]

    monkeypatch.setattr(kvdb.Session, "fork", full)
    with pytest.raises(CapacityError):
        cache.reorder_cache(torch.tensor([1, 1, 1, 1]))
    assert cache.sessions == before
    assert len(engine.handles) == 4, "the fork that was made is closed again"


def test_columns_behind_the_padding_are_taken_back(cache, spec):
    cache.crop(0)
    for wrong in (-1, 1):  # row 0 is all padding
        with pytest.raises(InvalidArgument, match=r"of a cache of 3 columns; expected 0, or .* up to 0 columns"):
            cache.crop(wrong)
    k = torch.randn(4, 2, 5, 16)
    for layer in range(spec.layers):
        keys, values = cache.update(k, k, layer)
        cache.layers[layer].attend(torch.randn(4, 4, 5, 16), keys, values, None)
    cache.crop(-2)
    assert (cache.get_seq_length(), lengths(cache)) == (6, [3, 4, 5, 6])
    cache.crop(-3)
    assert (cache.get_seq_length(), lengths(cache)) == (3, [0, 1, 2, 3])
    assert cache.is_croppable
    with pytest.raises(Unsupported, match="is not emptied"):
        cache.reset()


def test_a_batch_of_another_size_is_refused(cache):
    k = torch.randn(3, 2, 1, 16)
    keys, values = cache.update(k, k, 0)
    with pytest.raises(ShapeError, match="3 rows; expected 4"):
        cache.layers[0].attend(torch.randn(3, 4, 1, 16), keys, values, None)


def test_values_of_another_size_are_refused(cache):
    keys, values = cache.update(torch.randn(4, 2, 1, 16), torch.randn(4, 2, 1, 8), 0)
    with pytest.raises(Unsupported, match="layer 0 has keys of 16 and values of 8"):
        cache.layers[0].attend(torch.randn(4, 4, 1, 16), keys, values, None)


def test_a_returned_cache_can_be_looked_at_and_not_gone_on_with(attached, model):
    answer = attached.generate(prompts(1, 8), max_new_tokens=4, return_dict_in_generate=True)
    assert answer.past_key_values.get_seq_length() == 11
    with pytest.raises(SessionClosed):
        model(answer.sequences[:, -1:], past_key_values=answer.past_key_values)
