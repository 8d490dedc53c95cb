"""A search of some KV heads: what they find is what they find among all, and the others cost nothing."""

from dataclasses import replace

import numpy as np
import pytest

from indexes.base import Queries
from indexes.coarse.bounds import Bounds
from indexes.coarse.clusters import Clusters
from indexes.coarse.means import Means
from indexes.flat import Flat
from indexes.hnsw import Hnsw
from indexes.quantized import Quantized
from indexes.retrieval import Dipr, Exact, TopK, TopP
from tests.indexes.flat_data import some_blocks

KINDS = (Flat, Bounds, Means, Clusters, Hnsw, Quantized)
HEADS, GROUP, N = 4, 2, 2
RETRIEVALS = (Exact(), Dipr(0.02), TopK(40), TopP(0.6), TopP(0.97))


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.kind)
def index(request):
    return request.param.build(some_blocks(6000, kv_heads=HEADS))


@pytest.fixture(scope="module")
def queries():
    """Of sharp heads, diffuse ones, and one whose queries have seen most of the mass elsewhere."""
    rng = np.random.default_rng(3)
    lengths = np.repeat([3.0, 0.2, 1.0, 0.5], GROUP)[:, None, None]
    q = (lengths * rng.standard_normal((HEADS * GROUP, N, 64))).astype(np.float32)
    made = Queries.of(q, HEADS, 64**-0.5, 6000)
    outside = made.outside.copy()
    outside[2 * GROUP :] = 12
    return replace(made, outside=outside, begin=np.array([0, 70]), end=np.array([6000, 5900]))


def rows_of(found, head):
    for row in range(head * GROUP * N, (head + 1) * GROUP * N):
        at = slice(found.offsets[row], found.offsets[row + 1])
        yield found.ids[at], found.scores[at]


@pytest.mark.parametrize("retrieval", RETRIEVALS, ids=str)
@pytest.mark.parametrize("options", [{}, {"tight": True}, {"give_up": True}, {"estimate_tail": True}], ids=str)
def test_what_is_asked_comes_out_as_if_all_were(index, queries, retrieval, options):
    everything = index.search(queries, retrieval, **options)
    by_head = np.repeat(np.arange(HEADS), GROUP)
    for heads in ([0], [1, 3], [2], []):
        asked = np.isin(np.arange(HEADS), heads)
        found = index.search(replace(queries, active_heads=asked), retrieval, **options)
        crowded = everything.dense is not None and everything.dense.reshape(HEADS, -1).any(axis=1).sum() * 2 > HEADS
        for head in [] if crowded else heads:
            for (ids, scores), (all_ids, all_scores) in zip(rows_of(found, head), rows_of(everything, head), strict=True):
                np.testing.assert_array_equal(ids, all_ids)
                np.testing.assert_array_equal(scores, all_scores)
            mine = by_head == head
            np.testing.assert_array_equal(found.missed[mine], everything.missed[mine])
            np.testing.assert_array_equal(found.missed_bound[mine], everything.missed_bound[mine])
            if found.tail is not None:
                np.testing.assert_array_equal(found.tail[mine], everything.tail[mine])
            if found.dense is not None:
                np.testing.assert_array_equal(found.dense[mine], everything.dense[mine])
        others = ~np.isin(by_head, heads)
        assert np.diff(found.offsets).reshape(HEADS * GROUP, N)[others].sum() == 0
        assert np.isneginf(found.missed[others]).all()
        assert np.isneginf(found.missed_bound[others]).all()
        assert found.dense is None or not found.dense[others].any()
        assert found.tail is None or not found.tail[others].any()


@pytest.mark.parametrize("retrieval", RETRIEVALS, ids=str)
def test_work_is_counted_for_heads_that_are_asked(index, queries, retrieval):
    one = [index.search(replace(queries, active_heads=np.arange(HEADS) == head), retrieval) for head in range(HEADS)]
    everything = index.search(queries, retrieval)
    assert all(0 < found.scanned < everything.scanned for found in one)
    if not isinstance(retrieval, TopP):  # the rounds of a widened range are counted for the heads of each
        assert sum(found.scanned for found in one) == everything.scanned
    assert sum(found.nbytes for found in one) == pytest.approx(everything.nbytes, rel=0.05)
    nobody = index.search(replace(queries, active_heads=np.zeros(HEADS, np.bool_)), retrieval, tight=True)
    assert nobody.scanned == nobody.nbytes == len(nobody.ids) == 0


@pytest.mark.parametrize("asked", [np.ones(HEADS - 1, np.bool_), np.ones(HEADS + 1, np.bool_)])
def test_another_number_of_heads_is_refused(index, queries, asked):
    with pytest.raises(ValueError, match=r"active_heads has shape \[\d\]; expected \[4\]"):
        index.search(replace(queries, active_heads=asked), TopK(4))


@pytest.mark.parametrize("asked", [np.ones(HEADS, np.uint8), np.ones(HEADS, np.float32), np.ones((HEADS, 1), np.bool_)])
def test_what_is_no_row_of_booleans_is_refused(index, queries, asked):
    with pytest.raises(TypeError):
        index.search(replace(queries, active_heads=asked), TopK(4))


def test_the_mass_of_a_head_that_is_left_out_is_not_read(queries):
    index = Flat.build(some_blocks(6000, kv_heads=HEADS))
    some, rows = replace(queries, active_heads=np.array([True, False, True, False])), HEADS * GROUP * N
    offsets, ids, caps = np.zeros(rows + 1, np.int64), np.zeros(0, np.int32), np.ones(rows, np.float32)
    missed, bound = np.zeros((2, HEADS * GROUP, N), np.float32)
    index._kernels.missed_mass(index.blocks.native, some.native, offsets, ids, caps, 0.125, missed, bound)
    left_out = np.repeat(~some.active_heads, GROUP)
    assert (missed[left_out] == -np.inf).all()
    assert np.isfinite(missed[~left_out]).all()
