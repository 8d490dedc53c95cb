"""The tokens that a model selects by the keys of its indexer, and attention over chosen tokens."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb import _native
from tests.kvdb.native.blocks import DTYPES, Blocks, bits, random
from tests.kvdb.native.test_value_dims import dims, filled
from tests.reference import TOLERANCE, attention, relative_error

pytestmark = pytest.mark.usefixtures("isa")


def keys_of(dtype, head_dim, block_size, counts, values=None):
    """Blocks of an indexer's keys, of which so many tokens of each count, and these keys as they are stored."""
    blocks, k = Blocks(dtype, 1, head_dim, block_size, len(counts), 0), random((1, sum(counts), head_dim), dtype, 3)
    if values is not None:
        k = values.astype(DTYPES[dtype])
    begin = 0
    for b, count in enumerate(counts):
        blocks.write(b * block_size, k[:, begin : begin + count], None)
        begin += count
    return blocks, k[0]


def scores_of(blocks, queries, weights, counts):
    out = np.full((queries.shape[1], sum(counts)), np.nan, np.float32)
    _native.indexer_scores(blocks.geometry, queries, weights, blocks.table, np.asarray(counts, np.int32), out)
    return out


def selected(blocks, queries, weights, counts, top):
    n = queries.shape[1]
    ids, found = np.full((n, top), -7, np.int32), np.full(n, -7, np.int32)
    _native.indexer_select(blocks.geometry, queries, weights, blocks.table, np.asarray(counts, np.int32), ids, found)
    return [row[:count].tolist() for row, count in zip(ids, found, strict=True)]


def best(scores, top):
    """Of equal scores the earlier token first."""
    return np.sort(np.argsort(-scores, kind="stable")[:top]).tolist()


@st.composite
def indexers(draw):
    counts = draw(st.lists(st.integers(0, 64), min_size=1, max_size=14))
    return draw(st.sampled_from(list(DTYPES))), 8 * draw(st.integers(1, 20)), draw(st.sampled_from([1, 2, 3, 16, 33, 64])), counts


def queries_of(rng, shape, rounded):
    """float32; rounded: numbers of bfloat16."""
    queries = rng.standard_normal(shape).astype(np.float32)
    return queries.astype(ml_dtypes.bfloat16).astype(np.float32) if rounded else queries


@given(of=indexers(), n=st.sampled_from([1, 2, 7, 40]), rounded=st.booleans(), seed=st.integers(0, 1 << 30))
def test_scores_are_those_of_float32(of, n, rounded, seed):
    (dtype, head_dim, heads, counts), rng = of, np.random.default_rng(seed)
    blocks, k = keys_of(dtype, head_dim, 64, counts)
    queries, weights = queries_of(rng, (heads, n, head_dim), rounded), rng.standard_normal((heads, n)).astype(np.float32)
    got = scores_of(blocks, queries, weights, counts)
    products = np.maximum(queries.astype(np.float64) @ k.astype(np.float64).T, 0)
    expected = np.einsum("hnt,hn->nt", products, weights.astype(np.float64))
    sizes = np.abs(queries).astype(np.float64) @ np.abs(k).astype(np.float64).T  # to which errors are relative
    sizes = np.einsum("hnt,hn->nt", sizes, np.abs(weights).astype(np.float64))
    assert (np.abs(got - expected) <= 1e-6 * sizes + 1e-30).all()


@given(
    of=indexers(), n=st.sampled_from([1, 2, 7, 40]), top=st.sampled_from([0, 1, 5, 64, 300, 1000]), seed=st.integers(0, 1 << 30)
)
def test_the_largest_scores_are_selected(of, n, top, seed):
    (dtype, head_dim, heads, counts), rng = of, np.random.default_rng(seed)
    total = sum(counts)
    n = min(n, total)
    blocks, _ = keys_of(dtype, head_dim, 64, counts)
    queries, weights = queries_of(rng, (heads, n, head_dim), bool(seed % 2)), rng.standard_normal((heads, n)).astype(np.float32)
    scores = scores_of(blocks, queries, weights, counts)
    expected = [best(scores[i, : total - n + 1 + i], top) for i in range(n)]
    assert selected(blocks, queries, weights, counts, top) == expected


@given(of=indexers(), n=st.sampled_from([1, 3, 30]), top=st.integers(1, 200), seed=st.integers(0, 1 << 30))
def test_of_equal_scores_the_earlier_token_is_selected(of, n, top, seed):
    (dtype, head_dim, heads, counts), rng = of, np.random.default_rng(seed)
    total = sum(counts)
    n = min(n, total)
    blocks, k = keys_of(dtype, head_dim, 64, counts, rng.integers(-1, 2, (1, total, head_dim)))
    queries = rng.integers(-1, 2, (heads, n, head_dim)).astype(np.float32)
    weights = rng.integers(-2, 3, (heads, n)).astype(np.float32)
    products = np.maximum(np.einsum("hnd,td->hnt", queries, k.astype(np.float32)), 0)
    scores = np.einsum("hnt,hn->nt", products, weights)  # whole numbers: exact
    assert (scores_of(blocks, queries, weights, counts) == scores).all()
    expected = [best(scores[i, : total - n + 1 + i], top) for i in range(n)]
    assert selected(blocks, queries, weights, counts, top) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 16, 100])
@pytest.mark.parametrize("heads", [1, 64])
def test_selection_does_not_depend_on_blocks_or_threads(dtype, size, heads):
    total, head_dim, n = 5000, 32, 50  # heads * n: more rows than are scored together
    values = random((1, total, head_dim), dtype, 0)
    rng, threads = np.random.default_rng(1), _native.threads()
    queries, weights = queries_of(rng, (heads, n, head_dim), False), rng.standard_normal((heads, n)).astype(np.float32)
    whole, _ = keys_of(dtype, head_dim, 1000, [1000] * 5, values)
    ragged, left = [], total
    while left:
        ragged.append(int(min(left, rng.integers(0, size + 1))))
        left -= ragged[-1]
    blocks, _ = keys_of(dtype, head_dim, size, ragged, values)
    try:
        _native.set_threads(1)
        expected = selected(whole, queries, weights, [1000] * 5, 700)
        _native.set_threads(5)
        assert selected(blocks, queries, weights, ragged, 700) == expected
    finally:
        _native.set_threads(threads)


def test_queries_are_not_rounded():
    counts = [64] * 4
    blocks, k = keys_of("bfloat16", 64, 64, counts)
    queries = np.full((1, 1, 64), 1, np.float32)
    weights, close = np.ones((1, 1), np.float32), queries.copy()
    close[0, 0, 0] += 2**-20
    difference = scores_of(blocks, close, weights, counts) - scores_of(blocks, queries, weights, counts)
    positive = k.astype(np.float64).sum(axis=1) > 0.1
    np.testing.assert_allclose(difference[0, positive], 2**-20 * k[positive, 0].astype(np.float64), atol=2e-6)
    large = 1e4 * queries
    large[0, 0, 0] += 1
    difference = scores_of(blocks, large, weights, counts) - scores_of(blocks, 1e4 * queries, weights, counts)
    np.testing.assert_allclose(difference[0, positive], k[positive, 0].astype(np.float64), atol=0.05)


def test_scores_that_are_no_numbers_select_some_tokens():
    counts = [64] * 4
    blocks, _ = keys_of("float32", 8, 64, counts)
    queries = np.full((2, 3, 8), 3e38, np.float32)
    weights = np.array([[1, 1, 1], [-1, -1, 1]], np.float32)
    for row in selected(blocks, queries, weights, counts, 20):
        assert len(set(row)) == 20
        assert row == sorted(row)


def attend_chosen(blocks, q, counts, ids, found, scale, **options):
    out, lse = np.full((*q.shape[:2], blocks.geometry.value_dim), 7, q.dtype), np.full(q.shape[:2], 7, np.float32)
    counts = np.asarray(counts, np.int32)
    _native.attend_chosen(blocks.geometry, bits(q), blocks.table, counts, ids, found, scale, bits(out), lse, **options)
    return out, lse


@given(data=st.data())
def test_chosen_tokens_are_attended_and_nothing_else(data):
    dtype, of = data.draw(st.sampled_from(list(DTYPES)), "dtype"), data.draw(dims())
    kv_heads, group = data.draw(st.integers(1, 3), "kv_heads"), data.draw(st.sampled_from([1, 2, 8, 24]), "group")
    block_size = data.draw(st.sampled_from([1, 16, 24, 64]), "block_size")
    counts = data.draw(st.lists(st.integers(0, block_size), max_size=12), "counts")
    total, n = sum(counts), data.draw(st.sampled_from([1, 2, 7, 40]), "n")
    blocks, k, v = filled(dtype, kv_heads, block_size, counts, of)
    q, scale = random((kv_heads * group, n, of[0]), dtype, 2), of[0] ** -0.5
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30), "seed"))
    sinks = rng.normal(0, 3, len(q)).astype(np.float32) if data.draw(st.booleans(), "sinks") else None
    found = rng.integers(0, total + 1, n).astype(np.int32)
    ids = np.full((n, total), -1, np.int32)
    for i in range(n):
        ids[i, : found[i]] = np.sort(rng.permutation(total)[: found[i]])
    out, lse = attend_chosen(blocks, q, counts, ids, found, scale, sinks=sinks)
    expected, logs = np.zeros(out.shape), np.zeros(lse.shape)
    for i in range(n):
        seen = ids[i, : found[i]]
        expected[:, i : i + 1], logs[:, i : i + 1] = attention(q[:, i : i + 1], k[:, seen], v[:, seen], scale)
    if sinks is not None:
        with_sinks = np.logaddexp(logs, sinks[:, None].astype(np.float64))
        expected *= np.exp(logs - with_sinks)[..., None]
        logs = with_sinks
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    np.testing.assert_allclose(lse, logs, rtol=1e-5, atol=1e-5)


def test_wrong_arguments_are_refused():
    blocks, _ = keys_of("float32", 8, 16, [16])
    queries, weights, counts = np.zeros((2, 1, 8), np.float32), np.zeros((2, 1), np.float32), [16]
    with pytest.raises(ValueError, match="queries has shape"):
        selected(blocks, np.zeros((2, 1, 16), np.float32), weights, counts, 3)
    with pytest.raises(ValueError, match="weights has shape"):
        selected(blocks, queries, weights[:1], counts, 3)
    with pytest.raises(ValueError, match="queries are of 0 heads"):
        selected(blocks, queries[:0], weights[:0], counts, 3)
    with pytest.raises(ValueError, match="queries of 17 tokens"):
        selected(blocks, np.zeros((1, 17, 8), np.float32), np.zeros((1, 17), np.float32), counts, 3)
    with pytest.raises(ValueError, match=r"counts\[0\] is 17"):
        selected(blocks, queries, weights, [17], 3)
    for call in (scores_of, lambda *args: selected(*args, 3)):
        blocks.table = blocks.table + np.uint64(1)
        with pytest.raises(ValueError, match="the address of a block as it came"):
            call(blocks, queries, weights, counts)
        blocks.table = blocks.table - np.uint64(1)
    with pytest.raises(ValueError, match="of 2 KV heads; expected one"):
        scores_of(Blocks("float32", 2, 8, 16, 1), queries, weights, counts)
    whole = Blocks("float32", 1, 8, 16, 1)
    q = np.zeros((2, 1, 8), np.float32)
    for ids, found, match in (
        ([[1, 16]], [2], r"ids\[0, 1\] is 16; expected ascending tokens of the run, 0 to 15"),
        ([[1, 1]], [2], r"ids\[0, 1\] is 1"),
        ([[-1, 1]], [2], r"ids\[0, 0\] is -1"),
        ([[0, 1]], [3], r"found\[0\] is 3; expected 0 to 2"),
        ([[0, 1]], [-1], r"found\[0\] is -1"),
    ):
        with pytest.raises(ValueError, match=match):
            attend_chosen(whole, q, counts, np.asarray(ids, np.int32), np.asarray(found, np.int32), 1.0)
