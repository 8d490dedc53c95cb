"""Quantized blocks on every instruction set: attention over them, against dense attention over what they hold."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb import _native
from kvdb.codecs.registry import CODECS
from tests.kvdb.native.blocks import DTYPES, Blocks, bits, draw_run, random
from tests.reference import TOLERANCE, attention, relative_error

pytestmark = pytest.mark.usefixtures("isa")

FORMATS = {codec.representation.name: (codec.key_error_max, codec.value_error_max) for codec in CODECS.values() if codec.name}
"""The largest relative errors of normally distributed keys and values, as each codec says them, by its representation."""
ARITHMETIC = {"int8": 3e-3, "int8_int4": 1.5e-2, "int4": 2e-2}
"""The largest relative errors of an answer beside attention over what is stored: with four bits, a query and the weights are
rounded to eight."""


class Quantized:
    """The tokens of `blocks` in quantized blocks, and what these hold as float32."""

    def __init__(self, blocks, tokens, name):
        self.geometry, self.format = blocks.geometry, _native.BlockFormat[name]
        nbytes = _native.block_bytes(self.geometry, self.format)
        self.memory = np.full(len(blocks.table) * nbytes + 64, 0xFF, np.uint8)
        first = (self.memory.ctypes.data + 63) // 64 * 64
        self.table = np.uint64(first) + np.arange(len(blocks.table), dtype=np.uint64) * np.uint64(nbytes)
        key, key_norm, value, value_norm = _native.quantize(self.geometry, self.format, blocks.table, tokens, self.table)
        self.errors = (key / max(key_norm, 1e-300)) ** 0.5, (value / max(value_norm, 1e-300)) ** 0.5
        shape = self.geometry.kv_heads, tokens, self.geometry.head_dim
        self.k, self.v = np.zeros(shape, blocks.dtype), np.zeros(shape, blocks.dtype)
        _native.dequantize(self.geometry, self.format, self.table, 0, tokens, bits(self.k), bits(self.v))

    @property
    def tagged(self):
        return self.table | np.uint64(self.format.value)


def attend(geometry, q, table, counts, causal=0, placement=None):
    out, lse, top = np.full(q.shape, 7, np.float32), np.full(q.shape[:2], 7, np.float32), np.full(q.shape[:2], 7, np.float32)
    counts, scale = np.asarray(counts, np.int32), q.shape[2] ** -0.5
    _native.attend(geometry, bits(q), table, counts, causal, scale, out, lse, top, placement=placement)
    return out, lse, top


def filled(dtype, kv_heads, head_dim, block_size, tokens, seed=0):
    blocks = Blocks(dtype, kv_heads, head_dim, block_size, -(-tokens // block_size))
    k, v = (random((kv_heads, tokens, head_dim), dtype, seed + i) for i in range(2))
    assert blocks.write(0, k, v) is None
    return blocks, k, v


@pytest.mark.parametrize("name", FORMATS)
@given(st.integers(0, 32), st.sampled_from([32, 64]))
def test_a_block_is_cut_behind_any_token(name, n, head_dim):
    """What is left of it is as it was, and what was behind is gone: two blocks that differ there alone are the same then."""
    blocks, _, _ = filled("bfloat16", 2, head_dim, 32, 32)
    whole = Quantized(blocks, 32, name)
    nbytes = _native.block_bytes(whole.geometry, whole.format)
    once, twice = np.full((2, nbytes), 0xEE, np.uint8)
    _native.cut(whole.geometry, whole.format, int(whole.table[0]), n, once.ctypes.data)
    _native.cut(whole.geometry, whole.format, once.ctypes.data, 32, twice.ctypes.data)
    assert (once == twice).all(), "cut behind its end it stays as it is"
    k, v = (np.empty((2, 32, head_dim), np.uint16) for _ in range(2))
    _native.dequantize(whole.geometry, whole.format, np.array([once.ctypes.data], np.uint64), 0, 32, k, v)
    assert (k[:, :n] == bits(whole.k)[:, :n]).all()
    assert (v[:, :n] == bits(whole.v)[:, :n]).all()
    assert all((x[:, n:] == x[:, -1:]).all() for x in (k, v)), "the centre alone"
    partial = Quantized(blocks, n or 1, name)
    memory = partial.memory[int(partial.table[0]) - partial.memory.ctypes.data :][:nbytes]
    _native.cut(whole.geometry, whole.format, int(partial.table[0]), n or 1, twice.ctypes.data)
    assert (twice == memory).all(), "there is nothing behind the last token that was quantized"


def whole_blocks(tokens, block_size):
    return [min(block_size, tokens - start) for start in range(0, tokens, block_size)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_of_what_is_stored_is_the_one_reported(name, dtype):
    blocks, k, v = filled(dtype, 2, 128, 64, 200)
    stored = Quantized(blocks, 200, name)
    for reported, most, got, given_rows in zip(stored.errors, FORMATS[name], (stored.k, stored.v), (k, v), strict=True):
        assert 0 < reported <= most
        rounding = 0 if dtype == "float32" else 2**-8
        assert relative_error(got, given_rows) == pytest.approx(reported, rel=1e-3, abs=rounding)


@pytest.mark.parametrize("name", FORMATS)
def test_one_channel_that_stands_out_costs_the_others_little(name):
    blocks = Blocks("float32", 1, 128, 64, 1)
    k, v = (random((1, 64, 128), "float32", i) for i in range(2))
    k[..., 3] += 30
    assert blocks.write(0, k, v) is None
    got = Quantized(blocks, 64, name).k
    others = np.arange(128) != 3
    assert relative_error(got[..., others], k[..., others]) <= FORMATS[name][0]


@pytest.mark.parametrize("name", FORMATS)
@given(st.data())
def test_attention_is_that_over_what_is_stored(name, data):
    dtype, kv_heads, group, head_dim, block_size, _ = draw_run(data, [16, 48, 64, 128])
    tokens, n = data.draw(st.integers(1, 300), "tokens"), data.draw(st.integers(1, 6), "n")
    stored = Quantized(filled(dtype, kv_heads, head_dim, block_size, tokens)[0], tokens, name)
    q = random((kv_heads * group, n, head_dim), dtype, 2)
    causal = data.draw(st.sampled_from([0, n] if n <= tokens else [0]), "causal")
    out, lse, top = attend(stored.geometry, q, stored.tagged, whole_blocks(tokens, block_size), causal)
    expected, expected_lse = attention(q, stored.k, stored.v, head_dim**-0.5, causal)
    rounded = 2 * TOLERANCE[dtype]
    assert relative_error(out, expected) <= ARITHMETIC[name] + rounded
    assert np.abs(lse - expected_lse).max() <= 2e-2
    assert np.abs(top * head_dim**-0.5).max() < 1e3


@pytest.mark.parametrize("n", [1, 5, 40])
def test_a_run_may_mix_formats(n):
    dtype, counts = "bfloat16", [64, 64, 20]
    names = ["raw", "int8", "int4", "int8_int4"]
    parts = [filled(dtype, 2, 64, 64, sum(counts), seed=2 * i) for i in range(4)]
    stored = [
        None if name == "raw" else Quantized(blocks, sum(counts), name) for name, (blocks, _, _) in zip(names, parts, strict=True)
    ]
    order = [1, 2, 0, 3, 0]  # raw behind quantized blocks and before them, as stored segments and a tail may lie
    table = np.concatenate([parts[0][0].table if i == 0 else stored[i].tagged for i in order])
    held = [(stored[i].k, stored[i].v) if i else parts[0][1:] for i in order]
    k, v = (np.concatenate([np.asarray(pair[which], np.float32) for pair in held], axis=1) for which in (0, 1))
    q = random((8, n, 64), dtype, 99)
    for causal in (0, n):
        out, lse, _ = attend(parts[0][0].geometry, q, table, counts * len(order), causal)
        expected, expected_lse = attention(q, k, v, 64**-0.5, causal)
        assert relative_error(out, expected) <= 2e-2
        assert np.abs(lse - expected_lse).max() <= 2e-2


def test_moved_blocks_and_hidden_tokens():
    blocks, _, _ = filled("float32", 1, 64, 64, 128)
    stored = Quantized(blocks, 128, "int8")
    q = random((4, 1, 64), "float32", 5)
    angles = np.linspace(0.1, 2.0, 32, dtype=np.float32)[None]
    hidden = np.array([[0b1011], [1 << 63]], np.uint64)
    placement = _native.Placement(np.array([0, -1], np.int32), np.cos(angles), np.sin(angles), False, hidden)
    out, lse, _ = attend(stored.geometry, q, stored.tagged, [64, 64], placement=placement)
    raw = Blocks("float32", 1, 64, 64, 2)
    assert raw.write(0, stored.k, stored.v) is None
    expected, expected_lse, _ = attend(stored.geometry, q, raw.table, [64, 64], placement=placement)
    assert relative_error(out, expected) <= 1e-3
    np.testing.assert_allclose(lse, expected_lse, atol=1e-3)


def test_equal_tokens_and_zeros():
    blocks = Blocks("bfloat16", 1, 32, 16, 2)
    k, v = np.full((1, 20, 32), 3, ml_dtypes.bfloat16), np.zeros((1, 20, 32), ml_dtypes.bfloat16)
    assert blocks.write(0, k, v) is None
    for name in FORMATS:
        stored = Quantized(blocks, 20, name)
        assert relative_error(stored.k, k) <= 1e-2
        assert not stored.v.astype(np.float32).any()
        out, _, _ = attend(stored.geometry, k[:, :1], stored.tagged, [16, 4])
        assert not out.any()


def test_wrong_arguments_are_refused():
    geometry = _native.Geometry(_native.Dtype.float32, 1, 64, 40)
    with pytest.raises(ValueError, match="multiple of 16"):
        _native.block_bytes(geometry, _native.BlockFormat.int8)
    blocks, _, _ = filled("float32", 1, 64, 64, 64)
    q = random((1, 1, 64), "float32", 1)
    with pytest.raises(ValueError, match="format"):
        attend(blocks.geometry, q, blocks.table | np.uint64(5), [64])
    with pytest.raises(ValueError, match="raw"):
        _native.quantize(blocks.geometry, _native.BlockFormat.raw, blocks.table, 64, blocks.table)
