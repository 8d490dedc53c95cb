"""Queries that see a window of the tokens before them, and logits without a value."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb import _native
from tests.kvdb.native.blocks import DTYPES, Blocks, bits, random
from tests.kvdb.native.test_value_dims import dims, filled
from tests.reference import TOLERANCE, attention, relative_error

pytestmark = pytest.mark.usefixtures("isa")

WINDOWS = [1, 2, 15, 16, 17, 63, 64, 65, 200, 255, 256, 257, 1000]


def attend(blocks, q, counts, scale, **options):
    out = np.full((*q.shape[:2], blocks.geometry.value_dim), 7, q.dtype)
    lse, top = np.full(q.shape[:2], 7, np.float32), np.full(q.shape[:2], 7, np.float32)
    causal = options.pop("causal", 0)
    counts = np.asarray(counts, np.int32)
    _native.attend(blocks.geometry, bits(q), blocks.table, counts, causal, scale, bits(out), lse, top, **options)
    return out, lse, top


def expected_of(q, k, v, scale, ends, window=0, sinks=None):
    """Dense attention, query by query. ends: how many tokens each sees, but for those before its window."""
    n = q.shape[1]
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
    for i in range(n):
        seen = slice(max(0, ends[i] - window) if window else 0, ends[i])
        out[:, i : i + 1], lse[:, i : i + 1] = attention(q[:, i : i + 1], k[:, seen], v[:, seen], scale)
    if sinks is not None:
        total = np.logaddexp(lse, sinks[:, None].astype(np.float64))
        out *= np.exp(lse - np.where(np.isfinite(total), total, 0))[..., None]
        lse = total
    return out, lse


def check(got, expected, dtype):
    out, lse, _ = got
    assert relative_error(out, expected[0]) <= TOLERANCE[dtype]
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-5)


@given(data=st.data())
def test_any_window_and_any_sinks_of_any_run(data):
    dtype, of = data.draw(st.sampled_from(list(DTYPES)), "dtype"), data.draw(dims())
    kv_heads, group = data.draw(st.integers(1, 3), "kv_heads"), data.draw(st.sampled_from([1, 2, 3, 8, 24]), "group")
    block_size = data.draw(st.sampled_from([1, 16, 24, 64]), "block_size")
    counts = data.draw(st.lists(st.integers(0, block_size), max_size=12), "counts")
    total, n = sum(counts), data.draw(st.sampled_from([1, 2, 7, 40]), "n")
    blocks, k, v = filled(dtype, kv_heads, block_size, counts, of)
    q, scale = random((kv_heads * group, n, of[0]), dtype, 2), of[0] ** -0.5
    window = data.draw(st.integers(0, total + 5), "window")
    sinks = np.random.default_rng(n).normal(0, 3, len(q)).astype(np.float32) if data.draw(st.booleans(), "sinks") else None
    if sinks is not None and data.draw(st.booleans(), "some"):
        sinks[::2] = -np.inf
    kind = data.draw(st.sampled_from(["all", "causal", "ends"]), "kind")
    options, ends = {}, [total] * n
    if kind == "causal" and n <= total:
        options, ends = {"causal": n}, [total - n + 1 + i for i in range(n)]
    elif kind == "ends":
        ends = sorted(np.random.default_rng(n).integers(0, total + 1, n).tolist())
        options = {"ends": np.asarray(ends, np.int64)}
    got = attend(blocks, q, counts, scale, window=window, sinks=sinks, **options)
    check(got, expected_of(q, k, v, scale, ends, window, sinks), dtype)
    unsunk = attend(blocks, q, counts, scale, window=window, **options)
    assert np.array_equal(got[2], unsunk[2])  # no sink raises the largest score


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("n", [1, 5, 300])
def test_windows_around_edges_of_tiles(window, n):
    counts = [64] * 20 + [9]
    blocks, k, v = filled("bfloat16", 2, 64, counts, (64, 64, False))
    q, total = random((4, n, 64), "bfloat16", 2), sum(counts)
    threads = _native.threads()
    try:
        for used in (1, 5):
            _native.set_threads(used)
            got = attend(blocks, q, counts, 0.125, window=window, causal=n)
            check(got, expected_of(q, k, v, 0.125, [total - n + 1 + i for i in range(n)], window), "bfloat16")
    finally:
        _native.set_threads(threads)


@pytest.mark.parametrize("n", [1, 40])
def test_what_lies_before_a_window_is_not_read(n):
    counts = [16] * 30
    blocks = Blocks("float32", 1, 16, 16, 30)  # of NaN
    k, v = random((1, 480, 16), "float32", 0), random((1, 480, 16), "float32", 1)
    blocks.write(400, k[:, 400:], v[:, 400:])
    q = random((2, n, 16), "float32", 2)
    got = attend(blocks, q, counts, 0.25, window=32, causal=n)
    check(got, expected_of(q, k, v, 0.25, [480 - n + 1 + i for i in range(n)], 32), "float32")


@pytest.mark.parametrize("formats", [["int8"], ["int4", "raw"], ["raw", "int8", "int4"]])
@pytest.mark.parametrize("n", [1, 3])
def test_windows_and_sinks_over_blocks_of_several_formats(formats, n):
    counts = [64] * 9 + [30]
    blocks, k, v = filled("float32", 2, 64, counts, (64, 64, False))
    kept, table = [], blocks.table.copy()
    for b in range(len(counts)):
        kind = _native.BlockFormat[formats[b % len(formats)]]
        if kind == _native.BlockFormat.raw:
            continue
        memory = np.zeros(_native.block_bytes(blocks.geometry, kind) + 64, np.uint8)
        begin = np.uint64(-(-memory.ctypes.data // 64) * 64)
        _native.quantize(blocks.geometry, kind, blocks.table[b : b + 1], counts[b], np.array([begin]))
        rows = np.zeros((2, 2, counts[b], 64), np.float32)
        _native.dequantize(blocks.geometry, kind, np.array([begin]), 0, counts[b], *rows)
        k[:, b * 64 : b * 64 + counts[b]], v[:, b * 64 : b * 64 + counts[b]] = rows
        table[b] = begin | np.uint64(kind.value)
        kept.append(memory)
    blocks.table = table
    q, total = random((4, n, 64), "float32", 2), sum(counts)
    sinks = np.array([0.5, -np.inf, 2, -1], np.float32)
    ends = [total - n + 1 + i for i in range(n)]
    for window in (1, 70, 333):
        out, lse, _ = attend(blocks, q, counts, 0.125, window=window, sinks=sinks, causal=n)
        expected, expected_lse = expected_of(q, k, v, 0.125, ends, window, sinks)
        assert relative_error(out, expected) <= 0.02
        np.testing.assert_allclose(lse, expected_lse, atol=0.02)


def test_a_query_that_sees_nothing_has_the_sink_alone():
    blocks = Blocks("float32", 1, 16, 16, 1)
    q, sinks = random((2, 1, 16), "float32", 0), np.array([0.7, -np.inf], np.float32)
    out, lse, top = attend(blocks, q, [0], 1.0, sinks=sinks)
    assert (out == 0).all()
    assert lse.ravel().tolist() == [np.float32(0.7), -np.inf]
    assert (top == -np.inf).all()


@pytest.mark.parametrize("scale", [100.0, -100.0])
def test_sinks_far_from_all_scores(scale):
    counts = [64, 64]
    blocks, k, v = filled("float32", 1, 64, counts, (64, 64, False))
    for sink in (1e4, -1e4, 0.0):
        sinks = np.full(2, sink, np.float32)
        for n in (1, 40):
            q = random((2, n, 64), "float32", 2)
            out, lse, _ = attend(blocks, q, counts, scale, sinks=sinks)
            expected, expected_lse = expected_of(q, k, v, scale, [128] * n, 0, sinks)
            assert np.isfinite(out).all()
            np.testing.assert_allclose(out, expected, atol=2e-3)
            np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 1, 20, 500])
@pytest.mark.parametrize("sunk", [False, True])
def test_native_steps_with_a_window_and_sinks(window, sunk):
    counts = np.array([16, 16, 5, 0, 0], np.int32)
    blocks, k, v = filled("float32", 2, 16, counts.tolist(), (24, 16, False))
    sinks = np.array([1.0, 0, -np.inf, 2], np.float32) if sunk else None
    layer = _native.LayerSteps(blocks.geometry, 4, 0.2, np.zeros(1, np.float32), window)
    layer.set_sinks(np.zeros(4, np.float32))
    layer.set_sinks(sinks)
    layer.follow("asked", None, blocks.table, counts, 3, None, 37, 40, [])
    more_k, more_v, q = random((2, 40, 24), "float32", 5), random((2, 40, 16), "float32", 6), random((4, 40, 24), "float32", 7)
    turns = [[np.ascontiguousarray(x[:, t : t + 1]) for x in (q, more_k, more_v)] for t in range(40)]
    out = np.concatenate([layer.step(*turn, "asked", None) for turn in turns], 1)
    k, v = np.concatenate([k, more_k], 1), np.concatenate([v, more_v], 1)
    expected, _ = expected_of(q, k, v, 0.2, range(38, 78), window, sinks)
    assert relative_error(out, expected) <= TOLERANCE["float32"]
    assert layer.take_totals().scanned == sum(min(window or 1000, length) for length in range(38, 78))


def test_steps_of_several_sessions_have_sinks_and_windows_of_their_own():
    counts = np.array([16] * 100 + [0], np.int32)
    blocks, k, v = filled("float32", 1, 16, counts.tolist(), (16, 16, False))
    tail = [Blocks("float32", 1, 16, 16, 1) for _ in range(3)]
    sinks = [np.array([1.0, -2], np.float32), None, np.array([0.0, 3], np.float32)]
    layers, owned = [], []
    for own, sink, window in zip(tail, sinks, (0, 0, 50), strict=True):
        layer = _native.LayerSteps(blocks.geometry, 2, 0.3, np.zeros(1, np.float32), window)
        layer.set_sinks(sink)
        table, filled_counts = np.concatenate([blocks.table[:100], own.table]), counts.copy()
        layer.follow("asked", None, table, filled_counts, 100, None, 1600, 5, [])
        layers.append(layer)
        owned.append((table, filled_counts))
    more = [random((heads, 3, 1, 16), "float32", 8 + heads) for heads in (2, 1)]
    q, keys = (list(np.ascontiguousarray(x.swapaxes(0, 1))) for x in more)
    out = [np.zeros((2, 1, 16), np.float32) for _ in range(3)]
    assert _native.take_steps(layers, q, keys, keys, "asked", None, out, 512)
    for i, window in enumerate((0, 0, 50)):
        all_k, all_v = (np.concatenate([x, keys[i]], 1) for x in (k, v))
        expected, _ = expected_of(q[i], all_k, all_v, 0.3, [1601], window, sinks[i])
        assert relative_error(out[i], expected) <= TOLERANCE["float32"]


def test_wrong_sinks_and_windows_are_refused():
    blocks = Blocks("float32", 1, 16, 16, 1)
    q = np.zeros((2, 1, 16), np.float32)
    for sinks, match in (
        (np.zeros(3, np.float32), "sinks has shape"),
        (np.full(2, np.nan, np.float32), "sinks holds NaN or infinity"),
        (np.full(2, np.inf, np.float32), "sinks holds NaN or infinity"),
    ):
        with pytest.raises(ValueError, match=match):
            attend(blocks, q, [0], 1.0, sinks=sinks)
        with pytest.raises(ValueError, match=match):
            _native.LayerSteps(blocks.geometry, 2, 1.0, q).set_sinks(sinks)
    with pytest.raises(ValueError, match="window is -1"):
        attend(blocks, q, [0], 1.0, window=-1)
    with pytest.raises(ValueError, match="window is below 0"):
        _native.LayerSteps(blocks.geometry, 2, 1.0, q, -1)
