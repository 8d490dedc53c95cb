"""Attention over blocks that were moved: rotated queries against re-rotated keys in float64, on every instruction set."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb import _native
from tests.kvdb.native.blocks import DTYPES, draw_run, random
from tests.kvdb.native.moved import Moved
from tests.reference import relative_error

pytestmark = pytest.mark.usefixtures("isa")

# Queries are rotated in float32 and rounded to their type again, which is an error of its own.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 1e-2}
LSE_ATOL = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


def check(moved, q, dtype, *, causal=0, ends=None, out_dtype=None):
    n, scale = q.shape[1], q.shape[2] ** -0.5
    out, lse, top = moved.attend(q, scale, causal=causal, ends=ends, out_dtype=out_dtype)
    last = np.full(n, moved.tokens)
    seen = ends if ends is not None else last - n + 1 + np.arange(n) if causal else last
    expected, expected_lse, expected_top = moved.expected(q, scale, seen)
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=LSE_ATOL[dtype])
    np.testing.assert_allclose(top, expected_top, rtol=1e-5, atol=LSE_ATOL[dtype] / scale)


COUNTS = {16: [16, 16, 5, 16, 0, 1, 16, 16, 16], 64: [64, 64, 30, 64, 0, 64, 7], 96: [96, 40, 96, 96, 1]}
VIEWS = {"one": [0] * 9, "each": list(range(9)), "some": [-1, 0, 0, 1, 1, 2, 0, -1, -1]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block_size", "views", "interleaved"),
    [(16, "some", False), (16, "each", True), (64, "some", True), (64, "one", False), (96, "each", False), (96, "some", True)],
)
def test_rotated_queries_equal_rerotated_keys(dtype, block_size, views, interleaved):
    counts = COUNTS[block_size]
    view = VIEWS[views][: len(counts)]
    moved = Moved.of(dtype, 2, 64, block_size, counts, view, views=9, pairs=32, interleaved=interleaved, hidden=0.2)
    for n in (1, 5, 40):
        q = random((8, n, 64), dtype, 2)
        check(moved, q, dtype)
        check(moved, q, dtype, causal=n)
        check(moved, q, dtype, ends=np.sort(np.random.default_rng(n).integers(0, moved.tokens + 1, n)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "pairs"), [(72, 36), (72, 17), (80, 20), (8, 3), (128, 64), (256, 128), (256, 1), (40, 0)])
def test_a_part_of_the_dimensions_may_rotate(dtype, head_dim, pairs):
    for interleaved in (False, True):
        moved = Moved.of(dtype, 1, head_dim, 64, [64, 64, 9, 64], [0, 1, 1], views=2, pairs=pairs, interleaved=interleaved)
        for n in (1, 30):
            check(moved, random((3, n, head_dim), dtype, 2), dtype)


def test_many_rows_over_many_views():
    counts = [64] * 10 + [10, 64]
    moved = Moved.of("bfloat16", 2, 128, 64, counts, [b // 2 for b in range(12)], views=6, pairs=64, hidden=0.15)
    q = random((8, 300, 128), "bfloat16", 2)
    check(moved, q, "bfloat16", causal=300)
    check(moved, q, "bfloat16", ends=np.linspace(0, moved.tokens, 300).astype(np.int64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 5, 40])
def test_what_nobody_sees_counts_for_nobody(dtype, n):
    """Hidden from the first token on, behind what was seen, and everywhere."""
    counts, q = [64, 64, 20, 64], random((6, n, 32), dtype, 2)
    for part in (np.s_[:70], np.s_[70:], np.s_[64:148], np.s_[:]):
        moved = Moved.of(dtype, 2, 32, 64, counts, [0, 0, 1, 1], views=2, pairs=16, hidden=0.0)
        moved.hidden[part] = True
        check(moved, q, dtype)
        check(moved, q, dtype, causal=n)


@pytest.mark.parametrize("n", [1, 20])
def test_tiles_of_hidden_tokens_are_not_read(n):
    """So NaN does not show there."""
    moved = Moved.of("float32", 1, 16, 64, [64] * 10, [-1] * 10, views=0, pairs=0, hidden=0.0)
    moved.hidden[256:512] = True
    expected = moved.attend(random((2, n, 16), "float32", 2), 0.25)
    size = moved.blocks.geometry.block_bytes
    for block in range(4, 8):
        at = int(moved.blocks.table[block]) - moved.blocks.memory.ctypes.data
        moved.blocks.memory[at : at + size] = 0xFF
    for got, before in zip(moved.attend(random((2, n, 16), "float32", 2), 0.25), expected, strict=True):
        np.testing.assert_array_equal(got, before)


@given(data=st.data())
def test_any_placement_of_any_run(data):
    dtype, kv_heads, group, head_dim, block_size, counts = draw_run(data, [1, 3, 16, 64, 96, 100, 300])
    views = data.draw(st.integers(0, 4), "views")
    placed = data.draw(st.integers(0, len(counts)), "blocks placed")
    view = data.draw(st.lists(st.integers(-1, views - 1), min_size=placed, max_size=placed), "view")
    given = {
        "views": views,
        "pairs": data.draw(st.integers(0, head_dim // 2), "pairs"),
        "interleaved": data.draw(st.booleans(), "interleaved"),
        "hidden": data.draw(st.sampled_from([None, 0.0, 0.2, 0.97, 1.0]), "hidden"),
    }
    moved = Moved.of(dtype, kv_heads, head_dim, block_size, counts, view, **given)
    n = data.draw(st.integers(1, 40), "n")
    kind = data.draw(st.sampled_from(["all", "ends", "causal"]), "what queries see")
    causal = n if kind == "causal" and n <= moved.tokens else 0
    ends = data.draw(st.lists(st.integers(0, moved.tokens), min_size=n, max_size=n), "ends") if kind == "ends" else None
    out_dtype = data.draw(st.sampled_from(["float32", None]), "out_dtype")
    q = random((kv_heads * group, n, head_dim), dtype, 2)
    check(moved, q, dtype, causal=causal, ends=None if ends is None else np.sort(ends).astype(np.int64), out_dtype=out_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 40])
def test_a_placement_that_moves_and_hides_nothing_changes_no_bit(dtype, n):
    moved = Moved.of(dtype, 2, 64, 64, [64, 64, 11, 64], [-1] * 4, views=1, pairs=32, hidden=0.0)
    q = random((6, n, 64), dtype, 2)
    for got, plain in zip(moved.attend(q, 0.1), moved.attend(q, 0.1, placement=False), strict=True):
        np.testing.assert_array_equal(got, plain)


@pytest.mark.parametrize("n", [1, 5, 40])
def test_ends_that_say_what_causal_does_give_the_same_bits(n):
    moved = Moved.of("bfloat16", 2, 64, 64, [64, 64, 11, 64], [0, 1, 1, 0], views=2, pairs=32)
    q = random((6, n, 64), "bfloat16", 2)
    ends = np.arange(moved.tokens - n + 1, moved.tokens + 1)
    for got, causal in zip(moved.attend(q, 0.1, ends=ends), moved.attend(q, 0.1, causal=n), strict=True):
        np.testing.assert_array_equal(got, causal)


@pytest.mark.parametrize("n", [1, 20])
def test_several_threads_and_chosen_heads(n):
    moved = Moved.of("float32", 4, 64, 64, [64] * 60, [b // 3 for b in range(60)], views=20, pairs=32, hidden=0.1)
    q = random((8, n, 64), "float32", 2)
    expected, expected_lse, _ = moved.expected(q, 0.1, np.full(n, moved.tokens))
    threads = _native.threads()
    try:
        for used in (1, 2, 5):
            _native.set_threads(used)
            out, lse, _ = moved.attend(q, 0.1, heads=(1, 3))
            assert relative_error(out[2:6], expected[2:6]) <= 1e-5
            np.testing.assert_allclose(lse[2:6], expected_lse[2:6], rtol=1e-5, atol=1e-5)
            assert (out[[0, 1, 6, 7]] == 7).all()
    finally:
        _native.set_threads(threads)
