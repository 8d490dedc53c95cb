"""Tokens that move to other positions: keys rotated, rows picked one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb import _native
from tests.kvdb.native.blocks import DTYPES, Blocks, bits, random
from tests.kvdb.native.moved import angles, turned

pytestmark = pytest.mark.usefixtures("isa")

# Of one rounding to the type, of elements of about 1.
TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def filled(dtype, kv_heads, head_dim, block_size, count):
    blocks = Blocks(dtype, kv_heads, head_dim, block_size, count)
    shape = (kv_heads, count * block_size, head_dim)
    k, v = random(shape, dtype, 0), random(shape, dtype, 1)
    assert blocks.write(0, k, v) is None
    return blocks, k, v


def equal(a, b):
    return np.array_equal(bits(a), bits(b))


def untouched(blocks, n):
    """That no more bytes than n tokens of blocks that were 0xFF all over were written, if these hold no byte of 0xFF."""
    row = 2 * blocks.geometry.kv_heads * blocks.geometry.head_dim * blocks.dtype(0).nbytes
    return (blocks.memory != 0xFF).sum() <= n * row


@given(data=st.data())
def test_keys_that_are_placed_elsewhere_are_rotated(data):
    dtype = data.draw(st.sampled_from(list(DTYPES)), "dtype")
    kv_heads, head_dim = data.draw(st.integers(1, 3), "kv_heads"), 8 * data.draw(st.integers(1, 32), "head_dim / 8")
    block_size = data.draw(st.sampled_from([1, 3, 16, 64, 100]), "block_size")
    pairs, interleaved = data.draw(st.integers(0, head_dim // 2), "pairs"), data.draw(st.booleans(), "interleaved")
    count = data.draw(st.integers(1, 6), "blocks")
    start = data.draw(st.integers(0, count * block_size), "start")
    n = data.draw(st.integers(0, count * block_size - start), "n")
    to = data.draw(st.integers(0, count * block_size - n), "to")
    source, k, v = filled(dtype, kv_heads, head_dim, block_size, count)
    target = Blocks(dtype, kv_heads, head_dim, block_size, count)
    (cos,), (sin,) = angles(1, pairs)
    _native.place(source.geometry, source.table, start, target.table, to, n, cos, sin, interleaved)
    placed_k, placed_v = target.read(to, n)
    assert equal(placed_v, v[:, start : start + n])
    expected = turned(k[:, start : start + n], cos, sin, interleaved)
    np.testing.assert_allclose(placed_k.astype(np.float64), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert untouched(target, n)

    _native.place(source.geometry, source.table, start, target.table, to, n, None, None)
    assert equal(target.read(to, n)[0], k[:, start : start + n])


def test_many_tokens_are_placed_on_several_threads():
    source, k, v = filled("bfloat16", 4, 128, 64, 40)
    target = Blocks("bfloat16", 4, 128, 64, 40)
    (cos,), (sin,) = angles(1, 64)
    threads = _native.threads()
    try:
        _native.set_threads(4)
        _native.place(source.geometry, source.table, 7, target.table, 30, 2500, cos, sin)
    finally:
        _native.set_threads(threads)
    placed_k, placed_v = target.read(30, 2500)
    assert equal(placed_v, v[:, 7:2507])
    np.testing.assert_allclose(placed_k.astype(np.float64), turned(k[:, 7:2507], cos, sin, False), rtol=1e-2, atol=1.6e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 100])
@pytest.mark.parametrize("n", [0, 1, 70, 700])
def test_rows_are_scattered_and_gathered_one_by_one(dtype, block_size, n):
    rng = np.random.default_rng(n)
    source, k, v = filled(dtype, 3, 72, block_size, -(-720 // block_size))
    target = Blocks(dtype, 3, 72, block_size, -(-900 // block_size))
    positions = rng.choice(900, n, replace=False)
    _native.scatter(source.geometry, source.table, 20, target.table, positions)
    assert untouched(target, n)
    for at, chosen in ((positions, np.arange(n)), (positions[::-1].copy(), np.arange(n)[::-1])):
        got_k, got_v = (np.zeros((n, 3, 72), DTYPES[dtype]).swapaxes(0, 1) for _ in range(2))
        _native.gather_at(source.geometry, target.table, at, bits(got_k), bits(got_v))
        assert equal(got_k, k[:, 20 + chosen])
        assert equal(got_v, v[:, 20 + chosen])


def test_the_last_of_several_tokens_of_one_position_stays():
    source, k, v = filled("float32", 2, 8, 16, 4)
    target = Blocks("float32", 2, 8, 16, 1)
    _native.scatter(source.geometry, source.table, 0, target.table, np.array([5, 3, 5]))
    for got, put in zip(target.read(3, 3), (k, v), strict=True):
        assert equal(got[:, [0, 2]], put[:, [1, 2]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "pairs"), [(8, 4), (72, 36), (80, 17), (128, 64), (256, 128), (64, 0)])
def test_queries_are_rotated_back(dtype, interleaved, head_dim, pairs):
    geometry = _native.Geometry(getattr(_native.Dtype, dtype), 2, head_dim)
    (cos,), (sin,) = angles(1, pairs)
    for n in (0, 1, 3, 300):
        q = random((n, 6, head_dim), dtype, n).swapaxes(0, 1)
        expected = turned(q, cos, -sin, interleaved)
        out = np.zeros((6, n, head_dim), np.float32)
        _native.rotate(geometry, bits(q), cos, sin, interleaved, out)
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
        rounded = np.zeros(q.shape, DTYPES[dtype])
        _native.rotate(geometry, bits(q), cos, sin, interleaved, bits(rounded))
        assert equal(rounded, out.astype(DTYPES[dtype]))
        _native.rotate(geometry, bits(q), cos, sin, interleaved, bits(q))
        assert equal(q, rounded)


def test_rotation_is_exact_where_the_angle_is_none():
    geometry = _native.Geometry(_native.Dtype.bfloat16, 2, 128)
    q, out = random((4, 5, 128), "bfloat16", 0), np.zeros((4, 5, 128), DTYPES["bfloat16"])
    _native.rotate(geometry, bits(q), np.ones(64, np.float32), np.zeros(64, np.float32), False, bits(out))
    assert equal(out, q)
