"""Attention over selected pages and tokens, against dense attention over the same ones."""

import pytest
import torch

from kvdb.attention.triton import gather as module
from kvdb.attention.triton.workspace import Partials
from kvdb.storage.slot import SLOT_FORMATS, SlotLayout
from tests.kvdb.attention.triton.reference import TOLERANCE, error
from tests.kvdb.attention.triton.sequences import Sequences, nan, queries

KV_HEADS, GROUP = 2, 3
Q_HEADS = KV_HEADS * GROUP


def gather(q, pages, *arguments):
    partials = Partials.of(len(q), q.shape[1], KV_HEADS, q.shape[2], q.device)
    module.gather(partials, q, pages, *arguments)


def select(lists, capacity):
    """ids and counts of lists `[sequences][kv_heads]`; ids beyond are far outside."""
    ids = torch.full((len(lists), KV_HEADS, capacity), 1 << 28, dtype=torch.int32)
    counts = torch.tensor([[len(own) for own in heads] for heads in lists], dtype=torch.int32).view(-1, KV_HEADS)
    for s, heads in enumerate(lists):
        for h, own in enumerate(heads):
            ids[s, h, : min(capacity, len(own))] = torch.tensor(own[:capacity], dtype=torch.int32)
    return ids, counts


def tokens_of(page, unit, block_size, length):
    """The tokens of a page; pages are numbered block by block."""
    per_block = -(-block_size // unit)
    block, within = divmod(page, per_block)
    begin = block * block_size + within * unit
    return range(begin, min(begin + unit, (block + 1) * block_size, length))


def check(sequences, q, lists, unit, capacity=64, tolerance=1e-5):
    out, lse, top = nan(*q.shape, dtype=q.dtype), nan(*q.shape[:2]), nan(*q.shape[:2])
    scale = q.shape[2] ** -0.5
    gather(q, sequences.pages, sequences.runs, select(lists, capacity), unit, scale, out, lse, top)
    for s, length in enumerate(sequences.lengths):
        visible = torch.zeros(Q_HEADS, length, dtype=torch.bool)
        for h, own in enumerate(lists[s]):
            rows = slice(h * GROUP, (h + 1) * GROUP)
            if len(own) > capacity:
                visible[rows] = True
            for page in own:
                visible[rows, list(tokens_of(page, unit, sequences.pages.layout.block_size, length))] = True
        expected, expected_lse, expected_top = sequences.attention(q[s], s, scale, visible)
        some = visible.any(1)
        if some.any():
            assert error(out[s], expected) < tolerance
        assert torch.allclose(lse[s].double(), expected_lse, atol=10 * tolerance)
        assert torch.allclose(top[s].double(), expected_top, atol=20 * tolerance)
        assert (out[s][~some] == 0).all()


@pytest.mark.parametrize("format_", SLOT_FORMATS)
def test_tokens_of_every_format(format_):
    sequences = Sequences.of(SlotLayout(format_, KV_HEADS, 40, 16), [50, 33], seed=1)
    q = queries(2, Q_HEADS, 40)
    lists = [[[49, 0, 17, 16, 15], [3]], [[], list(range(33))]]
    check(sequences, q, lists, 1, tolerance=TOLERANCE[format_])


@pytest.mark.parametrize(("block_size", "unit"), [(64, 32), (48, 32), (16, 32), (7, 3), (1, 32)])
def test_pages_that_end_with_their_block_and_with_the_sequence(block_size, unit):
    lengths = [3 * block_size - block_size // 4, 2 * block_size]
    sequences = Sequences.of(SlotLayout("float32", KV_HEADS, 16, block_size), lengths, seed=block_size)
    per_block = -(-block_size // unit)
    last = 3 * per_block - 1
    check(sequences, queries(2, Q_HEADS, 16), [[[last, 0], [last]], [[per_block - 1], []]], unit)


@pytest.mark.parametrize("unit", [1, 8])
def test_more_than_the_capacity_is_everything(unit):
    sequences = Sequences.of(SlotLayout("bfloat16", KV_HEADS, 32, 16), [70], seed=2)
    check(sequences, queries(1, Q_HEADS, 32), [[[1, 2, 3, 4, 5], [0]]], unit, capacity=4, tolerance=1e-2)


def test_many_parts_are_merged():
    sequences = Sequences.of(SlotLayout("float32", KV_HEADS, 16, 64), [400], seed=3)
    lists = [[torch.randperm(400)[:300].tolist(), list(range(5))]]
    check(sequences, queries(1, Q_HEADS, 16), lists, 1, capacity=400)


def test_an_empty_sequence_and_an_empty_batch():
    layout = SlotLayout("float32", KV_HEADS, 16, 8)
    check(Sequences.of(layout, [0, 9]), queries(2, Q_HEADS, 16), [[[], []], [[0], [8]]], 1)
    check(Sequences.of(layout, []), queries(0, Q_HEADS, 16), [], 1)


def test_outputs_in_the_models_dtype():
    sequences = Sequences.of(SlotLayout("float16", KV_HEADS, 16, 8), [9])
    check(sequences, queries(1, Q_HEADS, 16, dtype=torch.float16), [[[0, 8], [1]]], 1, tolerance=2e-3)


def test_what_does_not_fit_is_refused():
    sequences = Sequences.of(SlotLayout("float32", KV_HEADS, 16, 8), [9])
    q, ids, counts = queries(1, Q_HEADS, 16), *select([[[0], [1]]], 4)
    out, lse = nan(*q.shape), nan(1, Q_HEADS)

    def call(q=q, ids=ids, counts=counts, unit=1, out=out, lse=lse):
        gather(q, sequences.pages, sequences.runs, (ids, counts), unit, 1.0, out, lse)

    for wrong, said in (
        ({"q": q[:, :, :8]}, "q is"),
        ({"out": nan(1, Q_HEADS, 8)}, "out is"),
        ({"lse": nan(1, Q_HEADS).double()}, "lse is"),
        ({"ids": ids.long()}, "ids are"),
        ({"counts": counts[:, :1]}, "counts are"),
        ({"unit": 0}, "unit is"),
    ):
        with pytest.raises(ValueError, match=said):
            call(**wrong)
