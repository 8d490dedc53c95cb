"""Keys and values go into blocks and come out as they were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb import _native
from tests.kvdb.native.blocks import DTYPES, Blocks, bits, random

pytestmark = pytest.mark.usefixtures("isa")


def equal(a, b):
    return np.array_equal(bits(a), bits(b))


@given(data=st.data())
def test_what_was_appended_is_gathered_and_copied(data):
    dtype = data.draw(st.sampled_from(list(DTYPES)), "dtype")
    kv_heads, head_dim = data.draw(st.integers(1, 3), "kv_heads"), 8 * data.draw(st.integers(1, 32), "head_dim / 8")
    block_size = data.draw(st.sampled_from([1, 3, 16, 64, 100]), "block_size")
    count = data.draw(st.integers(1, 6), "blocks")
    start = data.draw(st.integers(0, count * block_size), "start")
    n = data.draw(st.integers(0, count * block_size - start), "n")
    to = data.draw(st.integers(0, count * block_size - n), "to")
    blocks = Blocks(dtype, kv_heads, head_dim, block_size, count)
    # As a model's projection leaves them: tokens before heads.
    k = random((n, kv_heads, head_dim), dtype, 0).swapaxes(0, 1)
    v = random((n, kv_heads, head_dim), dtype, 1).swapaxes(0, 1)
    assert blocks.write(start, k, v) is None
    assert all(equal(a, b) for a, b in zip(blocks.read(start, n), (k, v), strict=True))

    target = Blocks(dtype, kv_heads, head_dim, block_size, count)
    _native.copy(blocks.geometry, blocks.table, start, target.table, to, n)
    assert all(equal(a, b) for a, b in zip(target.read(to, n), (k, v), strict=True))
    touched = (target.memory != 0xFF).sum() + (k.view(np.uint8) == 0xFF).sum() + (v.view(np.uint8) == 0xFF).sum()
    assert touched == k.nbytes + v.nbytes


def test_large_copies_stream_past_the_caches():
    tokens = 20_000
    blocks = Blocks("bfloat16", 2, 128, 64, -(-tokens // 64))
    k, v = random((2, tokens, 128), "bfloat16", 0), random((2, tokens, 128), "bfloat16", 1)
    assert blocks.write(0, k, v) is None
    assert all(equal(a, b) for a, b in zip(blocks.read(0, tokens), (k, v), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tokens", [1, 200])
def test_a_value_that_is_not_finite_is_reported(dtype, value, tokens):
    blocks = Blocks(dtype, 3, 24, 64, 4)
    k, v = random((3, tokens, 24), dtype, 0), random((3, tokens, 24), dtype, 1)
    v[1, tokens - 1, 23] = value
    assert blocks.write(0, k, v) == ("v", 1, tokens - 1)
    k[2, tokens - 1, 0] = value
    assert blocks.write(0, k, v) == ("k", 2, tokens - 1)
    v[0, 0, 7] = value
    assert blocks.write(0, k, v) == (("k", 2, 0) if tokens == 1 else ("v", 0, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_finite_values_pass(dtype):
    import ml_dtypes

    blocks = Blocks(dtype, 1, 8, 64, 1)
    largest = np.full((1, 5, 8), ml_dtypes.finfo(DTYPES[dtype]).max, DTYPES[dtype])
    assert blocks.write(0, largest, -largest) is None


def test_reading_all_bytes_gives_their_xor():
    blocks = Blocks("float32", 2, 24, 7, 5)
    blocks.memory[:] = np.random.default_rng(0).integers(0, 256, blocks.memory.size, np.uint8)
    expected = np.bitwise_xor.reduce(blocks.memory.view(np.uint64))
    assert _native.read_blocks(blocks.geometry, blocks.table) == expected
