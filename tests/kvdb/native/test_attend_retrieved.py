"""Attention over chosen tokens against plain numpy."""

import numpy as np
import pytest

import kvdb._native as native
from kvdb.attention import AttentionState, merge
from kvdb.storage.block_layout import BlockLayout
from kvdb.types import DTYPES, bits

HEADS, GROUP, TOKENS, BLOCK = 2, 3, 150, 16
SCALE = 0.2
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def made(rng, dtype, head_dim, n=2):
    layout = BlockLayout(dtype, HEADS, head_dim, BLOCK)
    count = layout.blocks_for(TOKENS)
    memory = np.empty((count, layout.nbytes), np.uint8)
    table = (memory.ctypes.data + layout.nbytes * np.arange(count)).astype(np.uint64)
    k, v = (rng.standard_normal((HEADS, TOKENS, head_dim)).astype(DTYPES[dtype]) for _ in range(2))
    assert layout.write(table, 0, k, v) is None
    q = rng.standard_normal((HEADS * GROUP, n, head_dim)).astype(DTYPES[dtype]).astype(np.float32)
    scores = np.einsum("hgnd,htd->hgnt", q.reshape(HEADS, GROUP, n, head_dim), k.astype(np.float32))
    return layout, table, memory, q, v.astype(np.float32), scores.reshape(HEADS * GROUP, n, TOKENS).astype(np.float32)


def plain(scores, v, wanted):
    """The state of each row over the tokens wanted of it, float64."""
    logits = np.where(wanted, scores.astype(np.float64) * SCALE, -np.inf)
    top = np.where(wanted.any(-1), logits.max(-1), 0)
    weights = np.exp(logits - top[..., None])
    total = weights.sum(-1)
    out = np.einsum("hnt,htd->hnd", weights, np.repeat(v, GROUP, axis=0)) / np.where(total, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        return AttentionState(out, top + np.log(total))


def found(wanted, scores):
    rows = wanted.reshape(-1, TOKENS)
    offsets = np.concatenate([[0], rows.sum(1).cumsum()]).astype(np.int64)
    return offsets, np.nonzero(rows)[1].astype(np.int32), scores.reshape(-1, TOKENS)[rows].astype(np.float32)


@pytest.mark.parametrize("head_dim", [8, 40, 128, 256])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("isa", native.isas())
def test_equals_numpy(rng, isa, dtype, head_dim):
    before = native.isa()
    native.set_isa(isa)
    try:
        layout, table, _memory, q, v, scores = made(rng, dtype, head_dim)
        first = rng.random(scores.shape) < 0.2
        second = (rng.random(scores.shape) < 0.4) & ~first
        second[1] = False  # a head that finds nothing
        first[2, 1] = second[2, 1] = False  # a row that sees nothing at all
        state = plain(scores, v, first)
        lse, out = state.lse.astype(np.float32), np.empty(q.shape, DTYPES[dtype])
        given = np.ascontiguousarray(state.out, np.float32)
        native.attend_retrieved(layout.native, table, *found(second, scores), SCALE, given, lse, bits(out), lse)
        expected = merge([plain(scores, v, first), plain(scores, v, second)])
        np.testing.assert_allclose(out.astype(np.float32), expected.out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        np.testing.assert_allclose(lse, expected.lse, atol=1e-5)
        assert lse[2, 1] == -np.inf
        assert not out[2, 1].any()
    finally:
        native.set_isa(before)


def test_many_tokens_a_row(rng):
    layout, table, _memory, q, v, scores = made(rng, "float32", 64)
    everything = np.ones(scores.shape, bool)
    out, lse = np.zeros(q.shape, np.float32), np.full(scores.shape[:2], -np.inf, np.float32)
    native.attend_retrieved(layout.native, table, *found(everything, scores), SCALE, out, lse, out, lse)
    expected = plain(scores, v, everything)
    np.testing.assert_allclose(out, expected.out, atol=1e-5)
    np.testing.assert_allclose(lse, expected.lse, atol=1e-5)


@pytest.mark.parametrize(
    ("what", "change", "message"),
    [
        ("offsets", lambda a: a[:-1], "in 13 steps"),
        ("offsets", lambda a: a[::-1].copy(), "must rise"),
        ("ids", lambda a: a + 1000, "expected tokens of the blocks"),
        ("ids", lambda a: a - 1000, "ids run from -"),
        ("scores", lambda a: a[:-1].copy(), "expected one for each"),
    ],
)
def test_wrong_arrays_are_refused(rng, what, change, message):
    layout, table, _memory, q, _v, scores = made(rng, "float32", 8)
    offsets, ids, values = found(rng.random(scores.shape) < 0.2, scores)
    arrays = {"offsets": offsets, "ids": ids, "scores": values}
    arrays[what] = change(arrays[what])
    state, lse = np.zeros(q.shape, np.float32), np.zeros(q.shape[:2], np.float32)
    with pytest.raises(ValueError, match=message):
        native.attend_retrieved(layout.native, table, *arrays.values(), SCALE, state, lse, state, lse)


def test_attend_tells_the_largest_score(rng):
    layout, table, _memory, q, _v, scores = made(rng, "float32", 40)
    counts = np.full(len(table), BLOCK, np.int32)
    counts[-1] = TOKENS - BLOCK * (len(table) - 1)
    out, lse, top = np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
    native.attend(layout.native, q, table, counts, 0, SCALE, out, lse, top)
    np.testing.assert_allclose(top, scores.max(-1), rtol=1e-5)
    native.attend(layout.native, q, table, np.zeros_like(counts), 0, SCALE, out, lse, top)
    assert (top == -np.inf).all()


@pytest.mark.parametrize("head_dim", [8, 40, 128])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("isa", native.isas())
def test_a_tail_is_merged(rng, isa, dtype, head_dim):
    layout = BlockLayout(dtype, HEADS, head_dim, BLOCK)
    shape = HEADS * GROUP, 2
    states = [
        AttentionState(rng.standard_normal((*shape, head_dim)).astype(np.float32), rng.normal(0, 3, shape).astype(np.float32))
        for _ in range(2)
    ]
    for state, rows in zip(states, ([0, 1], [1, 2]), strict=True):
        state.lse[rows] = -np.inf
        state.out[rows] = 0
    out, lse = np.empty((*shape, head_dim), DTYPES[dtype]), np.empty(shape, np.float32)
    before = native.isa()
    native.set_isa(isa)
    try:
        first, tail = states
        native.merge_tail(layout.native, first.out, first.lse, tail.out, tail.lse, bits(out), lse)
        expected = merge(states)
        np.testing.assert_allclose(out.astype(np.float32), expected.out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        np.testing.assert_allclose(lse, expected.lse, atol=1e-5)
        assert not out[1].any()
        native.merge_tail(layout.native, first.out, first.lse, tail.out, tail.lse, first.out, first.lse)  # in place
        np.testing.assert_allclose(first.out, expected.out, atol=1e-5)
        np.testing.assert_array_equal(first.lse, lse)
    finally:
        native.set_isa(before)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("state_out", lambda a: a[:5].copy(), "state_out has 5 heads"),
        ("state_lse", lambda a: a[:, :1].copy(), "state_lse has shape"),
        ("tail_out", lambda a: a[..., :8].copy(), "tail_out has shape"),
        ("tail_lse", lambda a: a[:5].copy(), "tail_lse has shape"),
        ("tail_lse", lambda a: a + np.float32(np.inf), "tail_lse holds NaN or infinity"),
        ("out", lambda a: a[:5].copy(), "out has shape"),
        ("out", lambda a: a.astype(np.float64), "out has the wrong type"),
        ("lse", lambda a: a[:5].copy(), "lse has shape"),
    ],
)
def test_a_wrong_tail_is_refused(name, change, message):
    layout = BlockLayout("float32", HEADS, 16, BLOCK)
    shape = HEADS * GROUP, 2
    names = ("state_out", "state_lse", "tail_out", "tail_lse", "out", "lse")
    arrays = {each: np.zeros(shape if each.endswith("lse") else (*shape, 16), np.float32) for each in names}
    arrays[name] = change(arrays[name])
    with pytest.raises(ValueError, match=message):
        native.merge_tail(layout.native, **arrays)
