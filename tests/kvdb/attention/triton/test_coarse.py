"""Channel bounds, scores by them, and attention over the best pages."""

import pytest
import torch

from kvdb.attention.triton import coarse
from kvdb.storage.slot import BOUND_TOKENS, SLOT_FORMATS, SlotLayout
from tests.kvdb.attention.triton.reference import error
from tests.kvdb.attention.triton.sequences import Sequences, nan, queries
from tests.kvdb.attention.triton.test_gather import tokens_of

KV_HEADS, GROUP = 2, 3
Q_HEADS = KV_HEADS * GROUP


def bounded(layout, lengths, seed=0):
    """Sequences with bounds, and how many pages the longest could have."""
    sequences = Sequences.of(layout, lengths, seed)
    coarse.bounds(sequences.pages, sequences.runs.table, sequences.counts())
    return sequences, -(-max(lengths) // layout.block_size) * layout.pages


def by_page(sequences, q, s, pages):
    """The tokens of each page, and the largest q.k that its channels allow, `[q_heads, pages]`."""
    layout, k = sequences.pages.layout, sequences.keys(s)
    tokens = [list(tokens_of(p, BOUND_TOKENS, layout.block_size, sequences.lengths[s])) for p in range(pages)]
    most = torch.full((Q_HEADS, pages), -torch.inf, dtype=torch.float64)
    for p, own in enumerate(tokens):
        for row in range(Q_HEADS if own else 0):
            channels = q[s, row].double() * k[row // GROUP, own]
            most[row, p] = channels.amax(0).sum()
    return tokens, most


@pytest.mark.parametrize("format_", SLOT_FORMATS)
@pytest.mark.parametrize(("block_size", "lengths"), [(64, [90, 64]), (48, [47, 100]), (7, [20, 3])])
def test_no_key_of_a_page_exceeds_its_bound(format_, block_size, lengths):
    sequences, pages = bounded(SlotLayout(format_, KV_HEADS, 24, block_size), lengths)
    q, out = queries(2, Q_HEADS, 24), nan(2, Q_HEADS, pages)
    coarse.score_bounds(q, sequences.pages, sequences.runs, out)
    for s in range(2):
        scores = sequences.scores(q[s], s)
        tokens, most = by_page(sequences, q, s, pages)
        for page, own in enumerate(tokens):
            if own:
                assert (out[s, :, page] >= scores[:, own].amax(1) - 1e-4).all()
                assert (out[s, :, page] >= most[:, page] - 1e-3).all()
                assert (out[s, :, page] <= most[:, page] + 0.01 * q[s].abs().sum(1)).all()
            else:
                assert (out[s, :, page] == -torch.inf).all()


def test_only_bounds_are_written():
    layout = SlotLayout("bfloat16", KV_HEADS, 16, 48)
    sequences = Sequences.of(layout, [60])
    before = sequences.pages.slab.clone()
    coarse.bounds(sequences.pages, sequences.runs.table, sequences.counts())
    changed = sequences.pages.slab != before
    assert changed.any()
    assert not changed[:, : layout.bounds_at].any()
    assert sorted(changed.any(1).nonzero()[:, 0].tolist()) == sorted(sequences.slots[0])


@pytest.mark.parametrize(("block_size", "lengths", "k"), [(64, [140, 0], 2), (48, [150], 1), (16, [50], 9)])
def test_the_best_pages_are_attended_and_the_rest_is_bounded(block_size, lengths, k):
    layout = SlotLayout("float32", KV_HEADS, 32, block_size)
    sequences, pages = bounded(layout, lengths, seed=1)
    count, scale = len(lengths), 32**-0.5
    workspace = coarse.CoarseWorkspace.of(layout, count, Q_HEADS, max(lengths), k, torch.device("cpu"))
    workspace.scores.fill_(torch.nan)
    q = queries(count, Q_HEADS, 32, length=1.0)
    for _ in range(2):  # the second time in a used workspace
        out, lse, top = nan(*q.shape), nan(count, Q_HEADS), nan(count, Q_HEADS)
        found = coarse.coarse_top(q, sequences.pages, sequences.runs, scale, k, workspace, out, lse, top)
    for s, length in enumerate(lengths):
        tokens = by_page(sequences, q, s, pages)[0]
        held = sum(map(bool, tokens))
        scores = sequences.scores(q[s], s)
        read = torch.zeros(Q_HEADS, length, dtype=torch.bool)
        for head in range(KV_HEADS):
            rows = slice(head * GROUP, (head + 1) * GROUP)
            ids = found.ids[s, head, : found.counts[s, head]].tolist()
            own = workspace.scores[s, rows].topk(min(k, held)).indices.flatten().tolist()
            assert set(ids) == set(own)
            read[rows, [t for page in ids for t in tokens[page]]] = True
        expected, expected_lse, expected_top = sequences.attention(q[s], s, scale, read)
        if length:
            assert error(out[s], expected) < 1e-5
        assert torch.allclose(lse[s].double(), expected_lse, atol=1e-4)
        assert torch.allclose(top[s].double(), expected_top, atol=1e-4)
        missed = torch.logsumexp((scale * scores).masked_fill(read, -torch.inf), 1)
        assert (found.missed_bound[s] >= missed - 1e-4).all()
        if read.all():
            assert (found.missed_bound[s] < -50).all()


def test_what_does_not_fit_is_refused():
    layout = SlotLayout("float32", KV_HEADS, 16, 64)
    sequences, pages = bounded(layout, [100])
    q = queries(1, Q_HEADS, 16)
    with pytest.raises(ValueError, match="out is"):
        coarse.score_bounds(q, sequences.pages, sequences.runs, nan(1, Q_HEADS, pages).double())
    with pytest.raises(ValueError, match="q is"):
        coarse.score_bounds(q[:, :3], sequences.pages, sequences.runs, nan(1, 3, pages))
    workspace = coarse.CoarseWorkspace.of(layout, 1, Q_HEADS, 64, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="the workspace is for"):
        coarse.coarse_top(q, sequences.pages, sequences.runs, 1.0, 1, workspace, nan(*q.shape), nan(1, Q_HEADS))
