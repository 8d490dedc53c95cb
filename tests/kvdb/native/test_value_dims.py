"""Values that are shorter or longer than keys, or the first numbers of them: every way in, out and through attention."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvdb import _native
from tests.kvdb.native.blocks import DTYPES, Blocks, bits, random
from tests.reference import TOLERANCE, attention, relative_error

pytestmark = pytest.mark.usefixtures("isa")

LATENTS = 576, 512, True


@st.composite
def dims(draw, least=8):
    """The numbers of a key and of a value, and whether these lie in keys."""
    head_dim = 8 * draw(st.integers(1, 80), "head_dim / 8")
    in_keys = draw(st.booleans(), "values_in_keys")
    most = head_dim if in_keys else 640
    return head_dim, 8 * draw(st.integers(max(least, 8 * in_keys) // 8, most // 8), "value_dim / 8"), in_keys


def tokens_of(dtype, kv_heads, n, of):
    """Keys, and values or what they are of keys; tokens before heads, as a model's projection leaves them."""
    head_dim, value_dim, in_keys = of
    k = random((n, kv_heads, head_dim), dtype, 0).swapaxes(0, 1)
    return k, k[..., :value_dim] if in_keys else random((n, kv_heads, value_dim), dtype, 1).swapaxes(0, 1)


def filled(dtype, kv_heads, block_size, counts, of):
    """Blocks of which each holds `counts[b]` tokens, and the run's k and v."""
    blocks = Blocks(dtype, kv_heads, of[0], block_size, len(counts), *of[1:])
    k, v = tokens_of(dtype, kv_heads, int(sum(counts)), of)
    done = 0
    for block, count in enumerate(counts):
        part = slice(done, done + count)
        assert blocks.write(block * block_size, k[:, part], None if of[2] else v[:, part]) is None
        done += count
    return blocks, k, v


def attend(blocks, q, counts, causal, scale, out_dtype):
    shape = (*q.shape[:2], blocks.geometry.value_dim)
    out, lse, top = np.full(shape, 7, out_dtype), np.full(shape[:2], 7, np.float32), np.full(shape[:2], 7, np.float32)
    _native.attend(blocks.geometry, bits(q), blocks.table, np.asarray(counts, np.int32), causal, scale, bits(out), lse, top)
    return out, lse


def equal(a, b):
    return np.array_equal(bits(np.ascontiguousarray(a)), bits(np.ascontiguousarray(b)))


@given(data=st.data())
def test_what_was_appended_is_read_copied_and_picked(data):
    dtype, of = data.draw(st.sampled_from(list(DTYPES)), "dtype"), data.draw(dims(least=0))
    kv_heads, block_size = data.draw(st.integers(1, 3), "kv_heads"), data.draw(st.sampled_from([1, 3, 16, 64]), "block_size")
    count = data.draw(st.integers(1, 5), "blocks")
    start = data.draw(st.integers(0, count * block_size), "start")
    n = data.draw(st.integers(0, count * block_size - start), "n")
    to = data.draw(st.integers(0, count * block_size - n), "to")
    blocks, target = (Blocks(dtype, kv_heads, of[0], block_size, count, *of[1:]) for _ in range(2))
    k, v = tokens_of(dtype, kv_heads, n, of)
    assert blocks.write(start, k, v if of[1] and not of[2] else None) is None
    assert all(equal(a, b) for a, b in zip(blocks.read(start, n), (k, v), strict=True))
    _native.copy(blocks.geometry, blocks.table, start, target.table, to, n)
    assert all(equal(a, b) for a, b in zip(target.read(to, n), (k, v), strict=True))
    stored = k.nbytes + (0 if of[2] else v.nbytes)
    written = (k.view(np.uint8) == 0xFF).sum() + (0 if of[2] else (np.ascontiguousarray(v).view(np.uint8) == 0xFF).sum())
    assert (target.memory != 0xFF).sum() + written == stored

    positions = np.random.default_rng(n).permutation(n).astype(np.int64) + to
    _native.scatter(blocks.geometry, blocks.table, start, target.table, positions)
    picked = np.zeros(k.shape, k.dtype), np.zeros(v.shape, k.dtype)
    _native.gather_at(blocks.geometry, target.table, positions, *map(bits, picked))
    assert all(equal(a, b) for a, b in zip(picked, (k, v), strict=True))


@given(data=st.data())
@example(data=None)
def test_attention_equals_dense_attention(data):
    if data is None:
        dtype, of, kv_heads, group, block_size, counts, n = "bfloat16", LATENTS, 1, 128, 64, [64, 64, 17, 64, 3], 1
    else:
        dtype, of = data.draw(st.sampled_from(list(DTYPES)), "dtype"), data.draw(dims())
        kv_heads, group = data.draw(st.integers(1, 3), "kv_heads"), data.draw(st.sampled_from([1, 2, 3, 8, 16, 40]), "group")
        block_size = data.draw(st.sampled_from([1, 3, 16, 64, 100]), "block_size")
        counts = data.draw(st.lists(st.integers(0, block_size), max_size=8), "counts")
        n = data.draw(st.integers(1, 20), "n")
    causal = n if n <= sum(counts) and (data is None or data.draw(st.booleans(), "causal")) else 0
    blocks, k, v = filled(dtype, kv_heads, block_size, counts, of)
    q, scale = random((kv_heads * group, n, of[0]), dtype, 2), of[0] ** -0.5
    for out_dtype in (DTYPES[dtype], np.float32):
        out, lse = attend(blocks, q, counts, causal, scale, out_dtype)
        expected, expected_lse = attention(q, k, v, scale, causal)
        assert relative_error(out, expected) <= TOLERANCE[dtype]
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of", [(192, 128, False), (64, 128, False), LATENTS, (640, 640, False), (256, 8, True)])
@pytest.mark.parametrize("n", [1, 3, 20])
def test_long_runs_by_several_threads(of, n):
    counts = [64] * 80 + [9]
    blocks, k, v = filled("bfloat16", 2, 64, counts, of)
    q, threads = random((8, n, of[0]), "bfloat16", 2), _native.threads()
    try:
        _native.set_threads(5)
        out, lse = attend(blocks, q, counts, n, 0.05, DTYPES["bfloat16"])
    finally:
        _native.set_threads(threads)
    expected, expected_lse = attention(q, k, v, 0.05, n)
    assert relative_error(out, expected) <= TOLERANCE["bfloat16"]
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [(16, 8, False), (8, 24, False), LATENTS, (40, 24, True)])
def test_found_tokens_and_tails_are_merged_into_a_state(dtype, of):
    counts = [16, 16, 5]
    blocks, k, v = filled(dtype, 2, 16, counts, of)
    heads, scale, total = 4, of[0] ** -0.5, sum(counts)
    q = random((heads, 1, of[0]), dtype, 2)
    scores = (q.astype(np.float32).reshape(2, 2, of[0]) @ k.astype(np.float32).swapaxes(1, 2)).reshape(heads, total)
    before, behind = range(9), range(30, total)
    parts = [attention(q, k[:, list(some)], v[:, list(some)], scale) for some in (before, behind)]
    states = [(out.astype(np.float32), lse.astype(np.float32)) for out, lse in parts]
    ids = np.tile(np.arange(9, 30, dtype=np.int32), heads)
    offsets = np.arange(heads + 1, dtype=np.int64) * 21
    out, lse = np.zeros((heads, 1, of[1]), np.float32), np.zeros((heads, 1), np.float32)
    found = np.ascontiguousarray(scores[:, 9:30].reshape(-1))
    _native.attend_retrieved(blocks.geometry, blocks.table, offsets, ids, found, scale, *states[0], out, lse)
    _native.merge_tail(blocks.geometry, out, lse, *states[1], out, lse)
    expected, expected_lse = attention(q, k, v, scale)
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [(16, 8, False), (8, 24, False), LATENTS])
def test_native_steps_append_and_answer(dtype, of):
    counts = np.array([16, 16, 5, 0], np.int32)
    blocks, k, v = filled(dtype, 2, 16, counts.tolist(), of)
    layer = _native.LayerSteps(blocks.geometry, 4, 0.1, np.zeros(1, DTYPES[dtype]))
    layer.follow("asked", None, blocks.table, counts, 3, None, 37, 20, [])
    layer.keep_last(20)
    more_k, more_v = (x[:, ::-1] for x in tokens_of(dtype, 2, 20, of))
    q = random((4, 20, of[0]), dtype, 2)
    answers = []
    for t in range(20):
        turn = (np.ascontiguousarray(x[:, t : t + 1]) for x in (q, more_k, more_v))
        queries, keys, values = turn
        answers.append(layer.step(queries, keys, None if of[2] else values, "asked", 37 + t))
    k, v = np.concatenate([k, more_k], 1), np.concatenate([v, more_v], 1)
    expected, _ = attention(q, k, v, 0.1, 20)
    assert relative_error(np.concatenate(answers, 1), expected) <= TOLERANCE[dtype]
    queries, kept = layer.recent()
    assert np.array_equal(np.frombuffer(queries, q.dtype).reshape(20, 4, of[0]), q.swapaxes(0, 1))
    assert np.array_equal(np.frombuffer(kept, q.dtype).reshape(20, 4, of[1]), np.stack(answers)[:, :, 0])


def test_what_makes_no_geometry_is_refused():
    for head_dim, value_dim, in_keys, match in (
        (648, 8, False, "head_dim is 648"),
        (16, 12, False, "value_dim is 12"),
        (16, -8, False, "value_dim is -8"),
        (16, 648, False, "value_dim is 648"),
        (16, 24, True, "value_dim is 24 of a key's 16"),
        (16, 0, True, "value_dim is 0 of a key's 16"),
    ):
        with pytest.raises(ValueError, match=match):
            _native.Geometry(_native.Dtype.float32, 1, head_dim, 16, value_dim, in_keys)
    assert _native.Geometry(_native.Dtype.float32, 2, 24, 16, 8).block_bytes == 2 * 16 * 32 * 4
    assert _native.Geometry(_native.Dtype.float32, 2, 24, 16, 8, True).block_bytes == 2 * 16 * 24 * 4
    assert _native.Geometry(_native.Dtype.float32, 2, 24, 16, 0).block_bytes == 2 * 16 * 24 * 4


def test_what_needs_other_values_is_refused():
    keys, latents = Blocks("float32", 1, 16, 16, 1, 0), Blocks("float32", 1, 16, 16, 1, 8, True)
    q = np.zeros((1, 1, 16), np.float32)
    counts = np.array([1], np.int32)
    with pytest.raises(ValueError, match="without values can be searched"):
        _native.attend(keys.geometry, q, keys.table, counts, 0, 1.0, np.zeros((1, 1, 0), np.float32))
    with pytest.raises(ValueError, match="without values can be searched"):
        _native.LayerSteps(keys.geometry, 1, 1.0, q)
    with pytest.raises(ValueError, match="of their own"):
        Blocks("float32", 1, 16, 16, 1).write(0, q, None)
    angles = np.ones(4, np.float32)
    with pytest.raises(ValueError, match="rotating these would change the values"):
        _native.place(latents.geometry, latents.table, 0, latents.table, 0, 1, angles, angles)
    for geometry in (keys.geometry, latents.geometry, _native.Geometry(_native.Dtype.float32, 1, 264, 16)):
        with pytest.raises(ValueError, match="quantized blocks hold keys and values of as many, 256 at most"):
            _native.block_bytes(geometry, _native.BlockFormat.int8)
    with pytest.raises(ValueError, match="quantized blocks hold"):
        _native.attend(latents.geometry, q, latents.table | np.uint64(1), counts, 0, 1.0, np.zeros((1, 1, 8), np.float32))
