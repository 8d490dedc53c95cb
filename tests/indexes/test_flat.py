"""Flat is exact: whatever its codes prune, it finds what reading every key finds."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import indexes._native as native
from indexes.base import IndexCorrupt
from indexes.blocks import DTYPES, Blocks
from indexes.flat import CHUNK, Flat
from indexes.retrieval import Dipr, Exact, Retrieval, TopK
from tests.indexes.flat_data import RETRIEVALS, check, every_score, some_blocks, some_queries


@pytest.fixture(autouse=True)
def best_isa():
    yield
    native.set_isa(native.isas()[0])


@pytest.mark.parametrize("retrieval", RETRIEVALS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", native.isas())
def test_finds_what_brute_force_finds(isa: str, dtype: str, retrieval: Retrieval) -> None:
    native.set_isa(isa)
    blocks = some_blocks(2 * CHUNK + 300, dtype=dtype)
    index = Flat.build(blocks)
    for length in (0.3, 4.0):
        queries = some_queries(blocks, length=length)
        for tight in (False, True):
            check(index.search(queries, retrieval, tight=tight), blocks, queries, retrieval)


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("head_dim", [8, 24, 80, 96, 128, 256])
def test_every_head_dim(isa: str, head_dim: int) -> None:
    native.set_isa(isa)
    blocks = some_blocks(CHUNK + 100, head_dim, dtype="bfloat16")
    index = Flat.build(blocks)
    index.verify()
    for length in (0.3, 3.0):
        queries = some_queries(blocks, length=length, group=3)
        check(index.search(queries, Dipr(0.012), tight=True), blocks, queries, Dipr(0.012))


@given(data=st.data())
def test_filters_and_batches(data: st.DataObject) -> None:
    tokens = data.draw(st.sampled_from([1, 63, 64, 65, 700, CHUNK, CHUNK + 1, 3 * CHUNK + 17]))
    n, group = data.draw(st.sampled_from([1, 2, 5])), data.draw(st.sampled_from([1, 2, 7]))
    seed = data.draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    blocks = some_blocks(tokens, 16, seed=seed, block_size=data.draw(st.sampled_from([16, 64, 100])))
    ends = np.sort(rng.integers(0, tokens + 1, (2, n)), axis=0)
    hidden = rng.integers(0, 2**64, -(-tokens // 64), np.uint64)
    hidden |= data.draw(st.sampled_from([np.uint64(0), np.uint64(2**64 - 1)]))
    shape = (blocks.kv_heads * group, n)
    queries = some_queries(
        blocks,
        n,
        group,
        data.draw(st.sampled_from([0.0, 0.2, 5.0])),
        seed,
        begin=ends[0],
        end=ends[1],
        hidden=data.draw(st.sampled_from([None, hidden])),
        floor=data.draw(st.sampled_from([-np.inf, 0.0, 20.0])) + np.zeros(shape, np.float32),
        outside=data.draw(st.sampled_from([-np.inf, 3.0])) + np.zeros(shape, np.float32),
    )
    retrieval = data.draw(st.sampled_from(RETRIEVALS))
    check(Flat.build(blocks).search(queries, retrieval, tight=data.draw(st.booleans())), blocks, queries, retrieval)


def test_many_rows_find_what_one_row_finds() -> None:
    blocks = some_blocks(CHUNK + 50, 32)
    index = Flat.build(blocks)
    queries = some_queries(blocks, n=130, group=2, length=2.0)
    check(index.search(queries, Dipr(0.012)), blocks, queries, Dipr(0.012))


def test_a_needle_in_a_dense_haystack_is_found_late_but_found() -> None:
    rng = np.random.default_rng(0)
    k = rng.standard_normal((1, 4 * CHUNK, 64)).astype(np.float32)
    k /= np.linalg.norm(k, axis=2, keepdims=True)  # no length tells it
    queries = some_queries(Blocks.of(k), group=2, length=3.0)
    k[0, -5] = queries.q[0, 0] / np.linalg.norm(queries.q[0, 0])
    blocks = Blocks.of(k)
    for alpha in (0.9, 0.5, 0.1):
        check(Flat.build(blocks).search(queries, Dipr(alpha)), blocks, queries, Dipr(alpha))


def test_adding_equals_building() -> None:
    whole = some_blocks(2 * CHUNK + 10, 32, dtype="float16")
    k = np.stack([whole.keys(head) for head in range(2)]).astype(np.float16)
    index = Flat.build(Blocks.of(k[:, :0]))
    for tokens in (1, 40, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 10):
        index.insert(Blocks.of(k[:, :tokens]))
        index.verify()
    for retrieval in (Dipr(0.012), TopK(20)):
        queries = some_queries(whole, length=2.0)
        check(index.search(queries, retrieval, tight=True), whole, queries, retrieval)
    with pytest.raises(ValueError, match="fewer|expected the"):
        index.insert(Blocks.of(k[:, :5]))
    with pytest.raises(ValueError, match="float32"):
        index.insert(Blocks.of(k.astype(np.float32)))


def test_empty_index() -> None:
    blocks = Blocks.of(np.empty((2, 0, 16), np.float32))
    index = Flat.build(blocks)
    index.verify()
    for retrieval in RETRIEVALS:
        found = index.search(some_queries(blocks), retrieval, tight=True)
        assert len(found.ids) == 0
        np.testing.assert_array_equal(found.offsets, 0)
        assert (found.missed_bound == -np.inf).all()


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, 1e30, 3e38])
def test_all_keys_equal_and_extreme(value: float) -> None:
    blocks = Blocks.of(np.full((1, CHUNK + 3, 16), value, np.float32))
    index = Flat.build(blocks)
    index.verify()
    for length in (0.0, 1e-20, 1.0):
        queries = some_queries(blocks, length=length)
        scores, _ = every_score(blocks, queries)
        found = index.search(queries, Dipr(0.012), tight=True)
        for row in range(queries.rows):
            expected = np.flatnonzero(scores[row] >= scores[row].max() - np.float32(Dipr(0.012).beta(queries.scale)))
            np.testing.assert_array_equal(found.ids[found.offsets[row] : found.offsets[row + 1]], expected)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_queries_that_are_no_numbers_are_refused(poison: float) -> None:
    blocks = some_blocks(100)
    queries = some_queries(blocks)
    queries.q[1, 0, 3] = poison
    with pytest.raises(ValueError, match="NaN or infinity"):
        Flat.build(blocks).search(queries, Dipr())


def test_wrong_shapes_are_refused() -> None:
    blocks = some_blocks(100)
    index = Flat.build(blocks)
    with pytest.raises(ValueError, match="head_dim"):
        index.search(some_queries(some_blocks(100, 32)), Dipr())
    with pytest.raises(ValueError, match="range"):
        index.search(some_queries(blocks, end=np.array([101])), Dipr())
    with pytest.raises(ValueError, match="room"):
        index._kernels.search(some_blocks(CHUNK + 1).native, some_queries(blocks).native, 1.0, 0, 1.0, False)


def test_k_beyond_all_tokens_finds_all() -> None:
    blocks = some_blocks(100)
    queries = some_queries(blocks)
    check(Flat.build(blocks).search(queries, TopK(10**12)), blocks, queries, Exact())


def test_saves_and_loads(tmp_path: Path) -> None:
    blocks = some_blocks(CHUNK + 77, dtype="bfloat16")
    index = Flat.build(Blocks.of(np.stack([blocks.keys(h, 0, 60) for h in range(2)]).astype(ml_dtypes.bfloat16)))
    index.insert(blocks)
    index.save(tmp_path / "index")
    loaded = Flat.load(tmp_path / "index", blocks)
    loaded.verify()
    queries = some_queries(blocks, length=2.0)
    check(loaded.search(queries, Dipr(0.1), tight=True), blocks, queries, Dipr(0.1))
    for other, why in (
        (some_blocks(CHUNK + 76, dtype="bfloat16"), "tokens"),
        (some_blocks(CHUNK + 77), "dtype"),
        (some_blocks(CHUNK + 77, dtype="bfloat16", seed=5), "other keys"),
    ):
        with pytest.raises(IndexCorrupt, match=why):
            Flat.load(tmp_path / "index", other)


def test_verify_sees_a_wrong_code() -> None:
    for name in ("centres", "lengths", "high", "low", "signs"):
        index = Flat.build(some_blocks(CHUNK + 5, 16))
        array = index.arrays[name]
        array.reshape(-1)[3] += 7
        if name == "lengths":
            array[0, 0, 3] = 0
        with pytest.raises(IndexCorrupt, match="build the index again"):
            index.verify()


def test_the_bound_is_tight_on_a_sharp_and_on_a_flat_head() -> None:
    blocks = some_blocks(4 * CHUNK, 128, dtype="bfloat16")
    index = Flat.build(blocks)
    for length in (0.5, 1.0, 1.5):
        queries = some_queries(blocks, n=20, length=length)
        found = index.search(queries, Dipr(0.012), tight=True)
        scores, seen = every_score(blocks, queries)
        ratios = []
        for row in range(queries.rows):
            seen[row, found.ids[found.offsets[row] : found.offsets[row + 1]]] = False
            left = queries.scale * scores[row][seen[row]].astype(float)
            if len(left):
                ratios.append(np.exp(found.missed_bound.reshape(-1)[row] - np.log(np.exp(left).sum())))
        assert min(ratios) >= 1
        assert np.median(ratios) < 1.5


def test_a_search_of_a_sharp_head_reads_little() -> None:
    blocks = some_blocks(16 * CHUNK, 64, kv_heads=1, dtype="bfloat16")
    queries = some_queries(blocks, length=1.0, floor=np.full((2, 1), 1e4, np.float32))
    found = Flat.build(blocks).search(queries, Dipr(0.012))
    assert len(found.ids) == 0
    assert found.nbytes < 0.05 * blocks.tokens * blocks.token_nbytes
