"""Coarse indexes against brute force: what they find, what they say they missed, what they estimate of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import indexes._native as _native
from indexes.base import Queries
from indexes.blocks import Blocks
from indexes.coarse.bounds import Bounds
from indexes.coarse.clusters import Clusters
from indexes.coarse.means import Means
from indexes.retrieval import Dipr, Exact, TopK, TopP
from tests.indexes.coarse_data import Layer, check_rows, logits, rows, same_set, wanted

KINDS = [Bounds, Means, Clusters]
RETRIEVALS = [Exact(), Dipr(0.05), TopK(12), TopP(0.7)]


@pytest.fixture(scope="module")
def layers():
    return {dtype: Layer.of(2500, dtype) for dtype in ("float32", "float16", "bfloat16")}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_retrieval_finds_what_brute_force_finds(layers, isa, kind, dtype):
    layer = layers[dtype]
    index = kind.build(layer.blocks, segment_tokens=1024)
    queries = layer.queries(begin=[0, 70], end=[2500, 2111])
    for retrieval in RETRIEVALS:
        found = index.search(queries, retrieval)
        x = check_rows(layer.blocks, queries, found)
        recalls = []
        for row, ids in enumerate(rows(found)):
            want = wanted(x[row], retrieval, queries.scale)
            if kind is Bounds or isinstance(retrieval, Exact):
                assert same_set(x[row], ids, want)
            elif isinstance(retrieval, Dipr):
                assert x[row, ids].min() >= x[row, ids].max() - retrieval.beta(queries.scale) - 1e-3
            elif isinstance(retrieval, TopK):
                assert len(ids) == len(want)
            recalls.append(len(np.intersect1d(ids, want)) / len(want))
        assert np.mean(recalls) >= (0.9 if isinstance(retrieval, TopP) else 0.98)


@pytest.mark.parametrize("kind", KINDS)
def test_less_is_read_than_there_is(kind):
    layer = Layer.of(16384, "bfloat16", n=1)
    index = kind.build(layer.blocks, segment_tokens=4096)
    everything = index.search(layer.queries(), Exact())
    found = index.search(layer.queries(), Dipr(0.05))
    if kind is Clusters:
        assert found.nbytes < everything.nbytes / 4
        assert found.scanned < everything.scanned / 2
    else:
        assert found.nbytes <= everything.nbytes


@pytest.mark.parametrize("retrieval", RETRIEVALS)
@pytest.mark.parametrize("kind", KINDS)
def test_segments_that_nobody_sees_are_passed_over(kind, retrieval):
    """What is found of one segment of eight is what an index over it alone finds, and no page of the others is looked at."""
    layer = Layer.of(16384, "bfloat16", n=1)
    index = kind.build(layer.blocks, segment_tokens=2048)
    seen = index.search(layer.queries(begin=[2048], end=[4096]), retrieval)
    assert seen.scanned <= layer.blocks.kv_heads * (2048 + 2048 // index.layout.page_size)
    x = check_rows(layer.blocks, layer.queries(begin=[2048], end=[4096]), seen)
    for row, ids in enumerate(rows(seen)):
        assert ((ids >= 2048) & (ids < 4096)).all()
        want = wanted(x[row], retrieval, layer.queries().scale)
        assert len(np.intersect1d(ids, want)) >= 0.9 * len(want)
    assert not len(index.search(layer.queries(begin=[2048], end=[2048]), retrieval).ids)


@pytest.mark.parametrize("kind", KINDS)
def test_the_maximum_may_lie_elsewhere(kind):
    layer = Layer.of(1500)
    index = kind.build(layer.blocks, segment_tokens=512)
    largest = logits(layer.blocks, layer.queries()).max()
    queries = layer.queries(floor=largest + 3)
    found = index.search(queries, Dipr(0.05))
    x = check_rows(layer.blocks, queries, found)
    for row, ids in enumerate(rows(found)):
        want = wanted(x[row], Dipr(0.05), queries.scale, floor=largest + 3)
        assert same_set(x[row], ids, want) if kind is Bounds else np.isin(ids, want).all()
    assert len(index.search(layer.queries(floor=1e6), Dipr(0.05)).ids) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_top_p_counts_the_mass_outside_as_had(kind):
    layer = Layer.of(1500)
    index = kind.build(layer.blocks)
    alone = index.search(layer.queries(), TopP(0.9))
    x = logits(layer.blocks, layer.queries())
    outside = float(np.median([np.log(np.exp(32**-0.5 * row).sum()) for row in x]))
    queries = layer.queries(outside=outside)
    found = index.search(queries, TopP(0.9))
    assert len(found.ids) < len(alone.ids)
    for row, ids in enumerate(rows(found)):
        want = wanted(x[row], TopP(0.9), queries.scale, outside=outside)
        assert abs(len(ids) - len(want)) <= (1 if kind is Bounds else 0.2 * len(want) + 2)
    assert len(index.search(layer.queries(outside=1e4), TopP(0.9)).ids) == 0


@given(data=st.data(), kind=st.sampled_from(KINDS), retrieval=st.sampled_from(RETRIEVALS), tight=st.booleans())
def test_filters_hold_for_any_range_and_any_bitmap(data, kind, retrieval, tight):
    tokens = data.draw(st.integers(1, 700))
    layer = Layer.of(tokens, n=3, seed=data.draw(st.integers(0, 3)), block_size=data.draw(st.sampled_from([16, 64])))
    ends = np.sort(data.draw(st.lists(st.integers(0, tokens), min_size=6, max_size=6))).reshape(2, 3)
    share = data.draw(st.sampled_from([0.0, 0.2, 0.9, 1.0]))
    hidden = np.random.default_rng(tokens).random(tokens) < share
    queries = layer.queries(ends[0], ends[1], hidden)
    index = kind.build(layer.blocks, segment_tokens=256)
    found = index.search(queries, retrieval, tight=tight, estimate_tail=True)
    x = check_rows(layer.blocks, queries, found)
    for row, ids in enumerate(rows(found)):
        if kind is Bounds or isinstance(retrieval, Exact):
            assert same_set(x[row], ids, wanted(x[row], retrieval, queries.scale))
        if tight:
            rest = x[row].copy()
            rest[ids] = -np.inf
            truth = np.log(np.exp(queries.scale * (rest - 1e3)).sum()) if np.isfinite(rest).any() else -np.inf
            if truth > -np.inf:
                np.testing.assert_allclose(found.missed_bound.reshape(-1)[row], truth + queries.scale * 1e3, atol=1e-3)


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("retrieval", [Dipr(0.3), TopK(5), TopP(0.2)])
def test_the_tail_brings_the_output_nearer(retrieval, hide):
    layer = Layer.of(4096)
    layer.q *= 0.2  # diffuse
    hidden = np.random.default_rng(0).random(4096) < 0.3 if hide else None
    blocks = layer.blocks
    if hide:  # what nobody sees must not be felt
        k = np.stack([blocks.keys(h) for h in range(2)])
        v = np.where(hidden[:, None], 1e4, np.stack([blocks.values(h) for h in range(2)]))
        blocks = Blocks.of(k, v.astype(np.float32))
    queries = layer.queries(hidden=hidden)
    found = Clusters.build(blocks, page_size=16, segment_tokens=1024).search(queries, retrieval, estimate_tail=True)
    x = check_rows(blocks, queries, found)
    plain, estimated = [], []
    for row, ids in enumerate(rows(found)):
        values = blocks.values(row // 4)
        weights = np.exp(queries.scale * (x[row] - x[row].max()))
        truth = weights @ values / weights.sum()
        out = weights[ids] @ values[ids]
        rest = np.exp(found.missed.reshape(-1)[row] - queries.scale * x[row].max())
        with_tail = (out + rest * found.tail.reshape(-1, 32)[row]) / (weights[ids].sum() + rest)
        plain.append(np.linalg.norm(out / weights[ids].sum() - truth) / np.linalg.norm(truth))
        estimated.append(np.linalg.norm(with_tail - truth) / np.linalg.norm(truth))
    assert np.median(estimated) < np.median(plain) / 4
    assert np.median(estimated) < 0.1


@pytest.mark.parametrize("retrieval", [Dipr(0.3), TopK(5), TopK(300)])
def test_the_tail_at_the_edges_is_that_of_what_is_seen(retrieval):
    """What a range leaves out is taken from the means of pages; what a bitmap hides never enters them."""
    layer = Layer.of(4096)
    layer.q *= 0.2
    hidden = np.ones(4096, bool)
    hidden[111:3777] = False
    index = Clusters.build(layer.blocks, page_size=16, segment_tokens=1024)
    ranged = index.search(layer.queries(begin=111, end=3777), retrieval, estimate_tail=True)
    masked = index.search(layer.queries(hidden=hidden), retrieval, estimate_tail=True)
    np.testing.assert_array_equal(ranged.ids, masked.ids)
    np.testing.assert_allclose(ranged.missed, masked.missed, atol=1e-4)
    off = np.linalg.norm(ranged.tail - masked.tail, axis=-1) / np.linalg.norm(masked.tail, axis=-1)
    assert off.max() < 1e-2


@pytest.mark.parametrize("kind", [Bounds, Means])
def test_kinds_without_values_estimate_no_tail(kind):
    layer = Layer.of(300)
    assert kind.build(layer.blocks).search(layer.queries(), Dipr(), estimate_tail=True).tail is None


def test_many_queries_at_once_are_answered_as_one_by_one():
    layer = Layer.of(1200, n=21)
    index = Bounds.build(layer.blocks, segment_tokens=512)
    together = rows(index.search(layer.queries(), Dipr(0.1)))
    for i in range(21):
        one = Queries.of(layer.q[:, i : i + 1], 2, 32**-0.5, 1200)
        for head, ids in enumerate(rows(index.search(one, Dipr(0.1)))):
            assert np.array_equal(ids, together[head * 21 + i])


def test_a_margin_of_one_overlooks_nothing():
    layer = Layer.of(3000, "bfloat16", topics=200)
    queries = layer.queries()
    for kind in (Means, Clusters):
        found = kind.build(layer.blocks, margin=1.0).search(queries, Dipr(0.2))
        x = check_rows(layer.blocks, queries, found)
        for row, ids in enumerate(rows(found)):
            assert same_set(x[row], ids, wanted(x[row], Dipr(0.2), queries.scale))


@pytest.mark.skipif("amx_emulated" not in _native.emulated_isas(), reason="needs the instructions beside the tiles")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_scans_by_tiles_are_those_by_vectors(kind, n):
    """Sums of integers are the same whoever makes them. Rows of 4, 6, 10 and 16 of a KV head: too few for tiles, and filling
    them in part and wholly."""
    rng = np.random.default_rng(n)
    k, v = rng.standard_normal((2, 2, 5000, 128)).astype(np.float32)
    q = 3 * rng.standard_normal((4, n, 128)).astype(np.float32)
    index = kind.build(Blocks.of(k, v, 64), segment_tokens=2048)
    queries = Queries.of(q, 2, 128**-0.5, 5000)
    before, found = _native.isa(), []
    try:
        for isa in ("avx512_bf16", "amx_emulated"):
            _native.set_isa(isa)
            found.append(index.search(queries, Dipr(0.05)))
    finally:
        _native.set_isa(before)
    for name in ("offsets", "ids", "scores", "missed", "missed_bound"):
        assert (getattr(found[0], name) == getattr(found[1], name)).all()
