"""Single rows of quantized blocks on every instruction set, as searches read them: against the bytes, decoded with numpy."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import indexes._native as index_native
from indexes.base import Queries
from indexes.blocks import Blocks as Indexed
from kvdb import _native
from tests.kvdb.native.blocks import draw_run
from tests.kvdb.native.test_quantized import FORMATS, Quantized, filled
from tests.reference import relative_error

pytestmark = pytest.mark.usefixtures("isa")

BITS = {"int8": (8, 8), "int8_int4": (8, 4), "int4": (4, 4)}
GROUP = 16
"""Tokens whose keys lie together."""
ROUNDED = 2e-6
"""Sums in float32, relative to the lengths that go into them."""


def hadamard(head_dim):
    """What the rotation multiplies by, float64 `[head_dim, head_dim]`: signs, then a transform of runs of channels."""
    together, bits = head_dim & -head_dim, 0x9E3779B9
    signs = np.empty(head_dim)
    for i in range(head_dim):
        bits = (bits * 1664525 + 1013904223) % 2**32
        signs[i] = -1 if bits >> 31 else 1
    one = np.array([[1.0]])
    while len(one) < together:
        one = np.block([[one, one], [one, -one]])
    return np.kron(np.eye(head_dim // together), one / np.sqrt(together)) * signs


def unpacked(codes, bits):
    """uint8 `[..., 4]` for each lane of 32 bits, or `[..., 2, 4]` of its halves."""
    return codes if bits == 8 else np.stack([codes & 15, codes >> 4], axis=-2)


def decoded(stored, tokens):
    """Keys and values, float64 `[kv_heads, tokens, head_dim]`, as `native/block_format.h` says they lie."""
    geometry, (key_bits, value_bits) = stored.geometry, BITS[stored.format.name]
    heads, d, size = geometry.kv_heads, geometry.head_dim, geometry.block_size
    nbytes = _native.block_bytes(geometry, stored.format)
    rotation, planes = hadamard(d), ([], [])
    for address in stored.table:
        at = int(address) - stored.memory.ctypes.data
        for head in stored.memory[at : at + nbytes].reshape(heads, -1):
            cuts = np.cumsum([size * d * key_bits // 8, size * d * value_bits // 8, 2 * d, 2 * d, 2 * size, 2 * size])
            keys, values, *rest = np.split(head, cuts)
            middles = [part.view(ml_dtypes.bfloat16).astype(np.float64) for part in rest[:4]]
            lanes = unpacked(keys.reshape(size // GROUP, -1, GROUP, 4), key_bits)
            codes = np.moveaxis(lanes, 2, 1).reshape(size, d)  # [group, lane, token, (half,) channel]
            planes[0].append((middles[0] + middles[2][:, None] * (codes - (2**key_bits - 1) / 2)) @ rotation)
            lanes = unpacked(values.reshape(-1, d, 4), value_bits)
            codes = np.moveaxis(lanes, 1, -1).reshape(size, d)  # [group, channel, (half,) token]
            codes = codes ^ 0x80 if value_bits == 8 else codes
            planes[1].append((middles[1] + middles[3][:, None] * (codes - (2**value_bits - 1) / 2)) @ rotation)
    return [np.stack(rows).reshape(-1, heads, size, d).swapaxes(0, 1).reshape(heads, -1, d)[:, :tokens] for rows in planes]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=settings.default.max_examples // 5)
@given(st.data())
def test_searches_read_rows_as_they_are_stored(name, data):
    dtype, kv_heads, group, head_dim, size, _ = draw_run(data, [16, 48, 64])
    tokens = data.draw(st.integers(1, 200), "tokens")
    stored = Quantized(filled(dtype, kv_heads, head_dim, size, tokens)[0], tokens, name)
    k, v = decoded(stored, tokens)
    blocks = Indexed(dtype, kv_heads, head_dim, size, stored.tagged, tokens, stored.memory)
    begin = data.draw(st.integers(0, tokens - 1), "begin")
    for head in range(kv_heads):
        assert relative_error(blocks.keys(head, begin), k[head, begin:]) <= ROUNDED
        assert relative_error(blocks.values(head, begin), v[head, begin:]) <= ROUNDED
    rng = np.random.default_rng(tokens)
    q = rng.standard_normal((kv_heads * group, 1, head_dim)).astype(np.float32)
    wanted = rng.random((kv_heads * group, tokens)) < data.draw(st.sampled_from([0.05, 0.5, 1]), "share")
    wanted[0] = False
    offsets, ids = np.concatenate([[0], wanted.sum(1).cumsum()]), np.nonzero(wanted)[1].astype(np.int32)
    scores = np.full(len(ids), np.nan, np.float32)
    queries = Queries.of(q, kv_heads, 1.0, tokens)
    index_native.score(blocks.native, queries.native, offsets, ids, scores)
    of_row, head = np.nonzero(wanted)[0], np.nonzero(wanted)[0] // group
    expected = np.einsum("nd,nd->n", q[of_row, 0].astype(np.float64), k[head, ids])
    lengths = np.linalg.norm(q[of_row, 0], axis=1) * np.linalg.norm(k[head, ids], axis=1)
    assert (np.abs(scores - expected) <= ROUNDED * lengths).all()
    check_values(stored, q, v, offsets, ids, scores)


def check_values(stored, q, v, offsets, ids, scores):
    """Attention over chosen tokens of the rows, whose scores are known, beside the same with numpy."""
    scale, group = q.shape[2] ** -0.5, len(q) // len(v)
    lse, out = np.full(q.shape[:2], -np.inf, np.float32), np.zeros(q.shape, np.float32)
    _native.attend_retrieved(stored.geometry, stored.tagged, offsets, ids, scores, scale, out, lse, out, lse)
    for row in range(len(q)):
        mine = slice(offsets[row], offsets[row + 1])
        weights = np.exp(scale * (scores[mine] - scores[mine].max(initial=-np.inf)).astype(np.float64))
        expected = weights @ v[row // group, ids[mine]] / max(weights.sum(), 1e-30)
        assert relative_error(out[row, 0], expected) <= 1e-5 if len(weights) else not out[row].any()
