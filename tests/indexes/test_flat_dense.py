"""Flat leaves what wants so much that reading everything costs less; all else it answers as ever."""

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import indexes._native as native
from benchmarks.workloads import Shape, generate
from indexes.base import Queries
from indexes.blocks import DTYPES, Blocks
from indexes.flat import CHUNK, Flat
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP
from tests.indexes.flat_data import RETRIEVALS, check, every_score, some_blocks, some_queries

FEW = 8192
"""A query that sees fewer tokens is always answered."""


@pytest.fixture(autouse=True)
def as_before():
    threads = native.threads()
    yield
    native.set_isa(native.isas()[0])
    native.set_threads(threads)


@lru_cache
def layer(kind: str) -> tuple[Blocks, Flat, Queries]:
    work = generate(kind, Shape(16 * CHUNK, kv_heads=2), queries=3, query_samples=1)
    blocks = Blocks.of(np.ascontiguousarray(work.k))
    return blocks, Flat.build(blocks), Queries.of(work.queries, 2, work.scale, blocks.tokens)


def everything(blocks: Blocks, queries: Queries) -> np.ndarray:
    """The log of the sum of exp(scale * q.k) over all that each row sees."""
    scores, seen = every_score(blocks, queries)
    scaled = np.where(seen, queries.scale * scores.astype(float), -np.inf)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(scaled).sum(1)).reshape(queries.q.shape[:2])


@pytest.mark.parametrize("retrieval", [Dipr(), TopK(1500), TopP(0.9), Exact()], ids=str)
def test_diffuse_heads_are_given_up(retrieval: Retrieval) -> None:
    blocks, index, queries = layer("diffuse")
    found = index.search(queries, retrieval, give_up=True)
    assert found.dense is not None
    assert found.dense.all()
    assert len(found.ids) == 0
    assert found.nbytes < 0.15 * blocks.tokens * blocks.kv_heads * blocks.token_nbytes
    check(found, blocks, queries, retrieval)
    assert np.isfinite(found.missed_bound).all()
    np.testing.assert_allclose(found.missed, everything(blocks, queries), atol=1)  # from a few tokens
    assert index.search(queries, retrieval).dense is None


@pytest.mark.parametrize("retrieval", [Dipr(), TopK(50), TopP(0.9)], ids=str)
@pytest.mark.parametrize("tight", [False, True])
def test_sharp_heads_are_answered(retrieval: Retrieval, tight: bool) -> None:
    blocks, index, queries = layer("sharp")
    found = index.search(queries, retrieval, tight=tight, give_up=True)
    assert found.dense is not None
    assert not found.dense.any()
    check(found, blocks, queries, retrieval)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", native.isas())
def test_of_one_kv_head_only_the_rows_that_want_much_are_left(isa: str, dtype: str) -> None:
    native.set_isa(isa)
    blocks = some_blocks(9 * CHUNK, 32, dtype=dtype)
    floor = np.full((8, 1), -np.inf, np.float32)
    floor[[1, 2, 7]] = 1e4  # found elsewhere, so that nothing here is wanted
    queries = some_queries(blocks, group=4, length=0.5, floor=floor)
    wants_much = floor[:, 0] < 0
    for tight in (False, True):
        found = Flat.build(blocks).search(queries, Dipr(), tight=tight, give_up=True)
        np.testing.assert_array_equal(found.dense[:, 0], wants_much)
        check(found, blocks, queries, Dipr())


def test_few_rows_that_want_little_are_answered_beside_a_kv_head_that_is_left() -> None:
    blocks = some_blocks(9 * CHUNK, 32)
    queries = some_queries(blocks, length=0.3)
    queries.q[2:] *= 50
    found = Flat.build(blocks).search(queries, Dipr(), give_up=True)
    np.testing.assert_array_equal(found.dense[:, 0], [True, True, False, False])
    check(found, blocks, queries, Dipr())


@pytest.mark.parametrize(("begin", "end", "left"), [(5, FEW + 4, False), (5, FEW + 5, True), (0, 16 * CHUNK, True)])
def test_queries_that_see_few_tokens_are_answered(begin: int, end: int, left: bool) -> None:
    blocks, index, queries = layer("diffuse")
    queries = some_queries(blocks, n=3, group=4, length=0.01, begin=np.full(3, begin), end=np.full(3, end))
    found = index.search(queries, Dipr(), give_up=True)
    assert found.dense.all() if left else not found.dense.any()
    check(found, blocks, queries, Dipr())


def test_hidden_tokens_are_not_wanted() -> None:
    blocks = some_blocks(10 * CHUNK, 16)
    index = Flat.build(blocks)
    words = np.full(-(-blocks.tokens // 64), 2**64 - 1, np.uint64)
    found = index.search(queries := some_queries(blocks, hidden=words), Dipr(), give_up=True)
    assert not found.dense.any()
    check(found, blocks, queries, Dipr())
    words[: 9 * CHUNK // 64] = 0
    found = index.search(queries := some_queries(blocks, hidden=words, length=0.1), Dipr(), give_up=True)
    assert found.dense.all()
    check(found, blocks, queries, Dipr())


@pytest.mark.parametrize("kind", ["sharp", "diffuse"])
def test_what_is_left_does_not_depend_on_threads(kind: str) -> None:
    _, index, queries = layer(kind)
    for alpha in (0.5, 0.1, 0.012):
        whole = []
        for threads in (1, 4, 4):
            native.set_threads(threads)
            found = index.search(queries, Dipr(alpha), give_up=True)
            whole.append((found.dense, found.offsets, found.ids, found.missed, found.missed_bound))
        for other in whole[1:]:
            for one, same in zip(whole[0], other, strict=True):
                np.testing.assert_array_equal(one, same)


@given(data=st.data())
def test_whatever_is_answered_is_right(data: st.DataObject) -> None:
    tokens = data.draw(st.sampled_from([FEW, 9 * CHUNK + 17, 20 * CHUNK]))
    n, group = data.draw(st.sampled_from([1, 2, 5])), data.draw(st.sampled_from([1, 4, 7]))
    seed = data.draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    blocks = some_blocks(tokens, 16, seed=seed)
    hidden = data.draw(st.sampled_from([None, rng.integers(0, 2**64, -(-tokens // 64), np.uint64)]))
    queries = some_queries(blocks, n, group, 1.0, seed, begin=rng.integers(0, 99, n), end=rng.integers(99, tokens + 1, n))
    queries.q[:] *= rng.choice([0.0, 0.1, 1.0, 8.0], (*queries.q.shape[:2], 1))
    queries = Queries(**{**vars(queries), "hidden": hidden})
    retrieval = data.draw(st.sampled_from(RETRIEVALS))
    found = Flat.build(blocks).search(queries, retrieval, tight=data.draw(st.booleans()), give_up=True)
    check(found, blocks, queries, retrieval)
    if isinstance(retrieval, TopK):  # too few to leave anything
        assert not found.dense.any()
