"""Exact attention: every instruction set that this machine has, against dense attention in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb import _native
from tests.kvdb.native.blocks import DTYPES, Blocks, bits, draw_run, random
from tests.reference import TOLERANCE, attention, relative_error

pytestmark = pytest.mark.usefixtures("isa")

EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300]


def attend(blocks, q, counts, causal=0, scale=None, out_dtype=None):
    out = np.full(q.shape, 7, q.dtype if out_dtype is None else DTYPES[out_dtype])
    lse = np.full(q.shape[:2], 7, np.float32)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    counts = np.asarray(counts, np.int32)
    _native.attend(blocks.geometry, bits(q), blocks.table, counts, causal, scale, bits(out), lse)
    return out, lse


def filled(dtype, kv_heads, head_dim, block_size, counts, seed=0):
    """Blocks of which each holds `counts[b]` tokens, and the run's k and v."""
    blocks = Blocks(dtype, kv_heads, head_dim, block_size, len(counts))
    shape = (kv_heads, int(sum(counts)), head_dim)
    k, v = random(shape, dtype, seed), random(shape, dtype, seed + 1)
    done = 0
    for block, count in enumerate(counts):
        part = slice(done, done + count)
        assert blocks.write(block * block_size, k[:, part], v[:, part]) is None
        done += count
    return blocks, k, v


def whole_blocks(tokens, block_size):
    return [min(block_size, tokens - start) for start in range(0, tokens, block_size)]


def check(blocks, q, k, v, counts, causal=0, scale=None, out_dtype=None):
    out, lse = attend(blocks, q, counts, causal, scale, out_dtype)
    expected, expected_lse = attention(q, k, v, q.shape[2] ** -0.5 if scale is None else scale, causal)
    dtype = next(name for name, kind in DTYPES.items() if kind == q.dtype)
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 4, 40])
def test_answers_of_all_kernels_agree(n):
    counts = [64, 3, 64, 64, 17]
    blocks, _, _ = filled("bfloat16", 2, 128, 64, counts)
    q, used = random((8, n, 128), "bfloat16", 2), _native.isa()
    out, lse = attend(blocks, q, counts, n)
    for other in [*_native.isas(), *_native.emulated_isas()]:
        _native.set_isa(other)
        out_there, lse_there = attend(blocks, q, counts, n)
        assert relative_error(out_there, out) <= TOLERANCE["bfloat16"]
        np.testing.assert_allclose(lse_there, lse, rtol=1e-5, atol=1e-5)
    _native.set_isa(used)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", EDGES)
def test_lengths_around_block_edges(dtype, tokens):
    counts = whole_blocks(tokens, 64)
    blocks, k, v = filled(dtype, 2, 64, 64, counts)
    for n in (1, 5, 20):
        check(blocks, random((8, n, 64), dtype, 2), k, v, counts)
        if n <= tokens:
            check(blocks, random((8, n, 64), dtype, 2), k, v, counts, causal=n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dimension(dtype, head_dim):
    counts = whole_blocks(150, 64)
    blocks, k, v = filled(dtype, 1, head_dim, 64, counts)
    check(blocks, random((4, 1, head_dim), dtype, 2), k, v, counts)
    check(blocks, random((4, 10, head_dim), dtype, 2), k, v, counts, causal=10)


@given(data=st.data())
def test_any_run_of_any_geometry(data):
    dtype, kv_heads, group, head_dim, block_size, counts = draw_run(data, [1, 3, 16, 24, 64, 100, 1024])
    n = data.draw(st.integers(1, 60), "n")
    causal = n if n <= sum(counts) and data.draw(st.booleans(), "causal") else 0
    out_dtype = data.draw(st.sampled_from(["float32", None]), "out_dtype")
    blocks, k, v = filled(dtype, kv_heads, head_dim, block_size, counts)
    q = random((kv_heads * group, n, head_dim), dtype, 2)
    check(blocks, q, k, v, counts, causal, out_dtype=out_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 40])
@pytest.mark.parametrize("scale", [8.0, -8.0, 100.0, 0.0])
def test_large_and_odd_logits_do_not_overflow(dtype, n, scale):
    counts = whole_blocks(200, 64)
    blocks, k, v = filled(dtype, 1, 64, 64, counts)
    q = random((2, n, 64), dtype, 2)
    out, lse = attend(blocks, q, counts, scale=scale)
    expected, expected_lse = attention(q, k, v, scale)
    assert np.isfinite(out.astype(np.float32)).all()
    # A float32 logit of some thousands is itself only known to a few 1e-4.
    assert relative_error(out, expected) <= max(TOLERANCE["bfloat16"], TOLERANCE[dtype])
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-4)


def test_long_runs_on_several_threads_equal_one_thread():
    counts = whole_blocks(5000, 64)
    blocks, k, v = filled("float32", 2, 64, 64, counts)
    threads = _native.threads()
    try:
        for n in (1, 30):
            q = random((4, n, 64), "float32", 2)
            for used in (1, 2, 5):
                _native.set_threads(used)
                check(blocks, q, k, v, counts, causal=n)
    finally:
        _native.set_threads(threads)


def test_states_of_many_splits_are_merged_by_several_threads():
    """Sixteen rows of eight KV heads in many splits are more to merge than one thread should do."""
    counts = whole_blocks(4608, 64)
    blocks, k, v = filled("bfloat16", 8, 128, 64, counts)
    q = random((128, 1, 128), "bfloat16", 2)
    threads = _native.threads()
    try:
        _native.set_threads(16)
        check(blocks, q, k, v, counts)
        before = np.array(_native.pool_counters())[:, 1].sum()
        attend(blocks, q, counts)
        splits, merged = 1 + 4608 // 256, 8
        assert np.array(_native.pool_counters())[:, 1].sum() - before == splits + merged
    finally:
        _native.set_threads(threads)


@pytest.mark.parametrize("n", [1, 3, 40])
def test_strided_queries_and_outputs(n):
    counts = whole_blocks(100, 64)
    blocks, k, v = filled("bfloat16", 2, 64, 64, counts)
    q = random((n, 4, 64), "bfloat16", 2).swapaxes(0, 1)
    out = np.zeros((n, 4, 64), DTYPES["bfloat16"]).swapaxes(0, 1)
    _native.attend(blocks.geometry, bits(q), blocks.table, np.asarray(counts, np.int32), 0, 0.125, bits(out))
    assert relative_error(out, attention(q, k, v, 0.125)[0]) <= TOLERANCE["bfloat16"]


def test_a_nan_in_the_query_shows_in_its_row_only():
    counts = whole_blocks(100, 64)
    blocks, _, _ = filled("float32", 1, 16, 64, counts)
    for n in (1, 30):
        q = random((2, n, 16), "float32", 2)
        q[1, n - 1, 3] = np.nan
        out, _ = attend(blocks, q, counts)
        assert np.isnan(out[1, n - 1]).all()
        out[1, n - 1] = 0
        assert np.isfinite(out).all()


@pytest.mark.parametrize("n", [1, 20])
def test_chosen_kv_heads_alone_are_attended(n):
    counts = whole_blocks(900, 64)
    blocks, k, v = filled("bfloat16", 4, 64, 64, counts)
    q = random((8, n, 64), "bfloat16", 2)
    out, lse = np.full(q.shape, 7, np.float32), np.full(q.shape[:2], 7, np.float32)
    given = blocks.geometry, bits(q), blocks.table, np.asarray(counts, np.int32), n, 0.1, out, lse, None
    _native.attend(*given, 2, 2)
    assert (out == 7).all()
    _native.attend(*given, 1, 3)
    expected, expected_lse = attention(q, k, v, 0.1, n)
    assert relative_error(out[2:6], expected[2:6]) <= TOLERANCE["bfloat16"]
    np.testing.assert_allclose(lse[2:6], expected_lse[2:6], rtol=1e-5, atol=1e-5)
    for others in (out[:2], out[6:], lse[:2], lse[6:]):
        assert (others == 7).all()
    for begin, end in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="not among the 4"):
            _native.attend(*given, begin, end)
