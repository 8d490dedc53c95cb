"""Builds that a device takes part in: a numpy accelerator stands in for it."""

from dataclasses import replace

import numpy as np
import pytest

import indexes._native as native
import indexes.registry as registry
from indexes.accelerate import KMeans
from indexes.blocks import Blocks
from indexes.coarse.clusters import Clusters
from indexes.coarse.layout import PageLayout
from indexes.flat import Flat
from indexes.hnsw import Hnsw
from indexes.hnsw.build import NO_LINK
from indexes.oracle import Oracle
from indexes.recall import measure
from indexes.retrieval import Dipr, TopK
from tests.indexes.accelerator import Plain, brute_nearest_before
from tests.indexes.coarse_data import Layer
from tests.indexes.hnsw_data import ask, layer


@pytest.fixture
def one_thread():
    """Otherwise hnswlib's links are others each time."""
    threads = native.threads()
    native.set_threads(1)
    yield
    native.set_threads(threads)


def built(name, blocks, query_samples=None, accelerator=None):
    steps = registry.build_steps(name, blocks, query_samples, accelerator)
    shares = []
    while True:
        try:
            shares.append(next(steps))
        except StopIteration as done:
            assert shares == sorted(shares)
            assert all(0 < share <= 1 for share in shares)
            return done.value


@pytest.mark.parametrize("kind", ["sharp", "diffuse"])
@pytest.mark.parametrize("learnt", [True, False])
def test_a_graph_of_exact_neighbours_finds_no_less_than_one_of_hnswlib(kind, learnt):
    tokens = 5200  # more than a search looks at without a walk
    more, q, query_samples = layer(kind)
    blocks = replace(more, tokens=tokens)
    accelerator = Plain()
    exact = built("hnsw", blocks, query_samples if learnt else None, accelerator)
    usual = Hnsw.build(blocks, query_samples if learnt else None)
    exact.verify()
    assert accelerator.calls == ["nearest_before"] * 2 + ["neighbours"] * 2 * learnt
    oracle = Oracle(blocks, ask(q, tokens, window=False))
    for retrieval in (Dipr(0.012), TopK(40)):
        recall, usual_recall = (
            measure(index, oracle.queries, retrieval, repetitions=1, oracle=oracle).recall for index in (exact, usual)
        )
        assert recall >= usual_recall - 0.002
        assert recall > 0.97


def test_links_are_what_the_rule_takes_of_exact_neighbours_both_ways():
    keys = np.random.default_rng(3).standard_normal((2, 150, 16)).astype(np.float32)
    made = Hnsw.build(Blocks.of(keys), accelerator=Plain())
    for head in range(2):
        distance = np.square(keys[head][:, None].astype(np.float64) - keys[head]).sum(-1)
        own = [ruled(distance, token, near[near >= 0]) for token, near in enumerate(brute_nearest_before(keys[head], 64))]
        for token, links in enumerate(made.codes.links[head, :150]):
            back = [other for other in range(150) if token in own[other]]
            wanted = ruled(distance, token, [*own[token], *back])
            found = links[links != NO_LINK].tolist()
            assert set(wanted) <= set(found)  # more only where the repair made a link
            assert found[: len(wanted)] == wanted[::-1] or len(found) > len(wanted)


def ruled(distance, token, candidates, most=24):
    """Algorithm 4 of HNSW's paper: nearest first, what is closer to the token than to all that was taken before."""
    near = sorted(set(map(int, candidates)), key=lambda other: distance[token, other])
    if len(near) <= most:
        return near
    chosen = []
    for other in near:
        if len(chosen) < most and all(distance[other, taken] >= distance[token, other] for taken in chosen):
            chosen.append(other)
    return chosen


@pytest.mark.parametrize("heads_max", [0, 1])
def test_a_graph_goes_on_with_hnswlib_where_the_accelerator_is_lost(heads_max, one_thread):
    more, _, query_samples = layer()
    blocks = replace(more, tokens=1500)
    whole, usual = (Hnsw.build(blocks, query_samples, accelerator=accelerator) for accelerator in (Plain(), None))
    index = built("hnsw", blocks, query_samples, Plain(heads_max))
    index.verify()
    np.testing.assert_array_equal(index.starts, whole.starts)
    for head in range(2):
        expected = whole if head < heads_max else usual
        np.testing.assert_array_equal(index.codes.links[head], expected.codes.links[head])


def test_samples_learnt_by_the_accelerator_show_what_the_processor_finds():
    more, _, query_samples = layer()
    blocks = replace(more, tokens=1500)
    base = Hnsw.build(blocks)
    for accelerator in (None, Plain()):
        learning = replace(base, codes=base.codes)
        list(learning._learn_steps(query_samples, accelerator))
        if accelerator is None:
            starts = learning.starts
    np.testing.assert_array_equal(np.sort(learning.starts, axis=1), np.sort(starts, axis=1))


@pytest.mark.parametrize("tokens", [0, 1, 2, 40])
def test_a_few_tokens_make_a_graph_too(tokens):
    keys = np.random.default_rng(tokens).standard_normal((2, tokens, 16)).astype(np.float32)
    index = Hnsw.build(Blocks.of(keys), accelerator=Plain())
    index.verify()
    found = index.search(ask_all(tokens), TopK(5))
    assert len(found.ids) == 4 * min(tokens, 5)


def ask_all(tokens):
    return ask(np.ones((4, 1, 16), np.float32), tokens, window=False)


@pytest.mark.parametrize("tokens", [256, 300, 700])
def test_clusters_that_are_handed_in_are_kept(tokens):
    blocks = Layer.of(tokens).blocks
    accelerator = Plain()
    index = Clusters.build(blocks, segment_tokens=256, accelerator=accelerator)
    index.verify()
    batches = 1 + (tokens > 256)
    assert accelerator.calls == ["clusters"] * 2 * batches
    for batch in index._batches:
        count = -(-batch.tokens // 32)
        members, first = batch.arrays["members"][-1, -1], batch.arrays["first"][-1, -1]
        for cluster in range(count):
            np.testing.assert_array_equal(members[first[cluster] : first[cluster + 1]], np.arange(cluster, batch.tokens, count))


def test_clusters_are_those_of_the_processor_where_the_accelerator_is_lost():
    blocks = Layer.of(700).blocks
    usual = Clusters.build(blocks, segment_tokens=256)
    for heads_max in (0, 1):
        index = Clusters.build(blocks, segment_tokens=256, accelerator=Plain(heads_max))
        for mine, theirs in zip(index._batches, usual._batches, strict=True):
            for name in mine.arrays:
                np.testing.assert_array_equal(mine.arrays[name], theirs.arrays[name])


def test_only_kinds_that_can_use_an_accelerator_get_one():
    blocks, accelerator = Layer.of(300).blocks, Plain()
    for name in ("flat", "coarse-bounds", "coarse-means"):
        built(name, blocks, None, accelerator).verify()
    assert accelerator.calls == []
    assert not getattr(Flat, "accelerated", False)
    for name in ("coarse-clusters", "hnsw"):
        built(name, blocks, None, accelerator).verify()
    assert set(accelerator.calls) == {"clusters", "nearest_before"}


def test_seeds_are_different_tokens_for_any_share():
    for tokens, count, far in ((8192, 256, 0.5), (5, 5, 0.0), (33, 2, 0.99), (1, 1, 0.5)):
        how = KMeans.of(tokens, count, 10, far)
        assert len(how.seeds) == count - int(far * count)
        assert len(set(how.seeds.tolist())) == len(how.seeds)
        assert how.seeds.min(initial=0) >= 0
        assert how.seeds.max(initial=0) < tokens


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_stored_keys_are_the_keys_as_stored(dtype, block_size):
    blocks = Layer.of(150, dtype, block_size=block_size).blocks
    for begin, end in ((0, None), (0, 0), (63, 65), (149, 150)):
        stored = blocks.stored_keys(1, begin, end)
        assert stored.dtype.name == dtype
        np.testing.assert_array_equal(stored.astype(np.float32), blocks.keys(1, begin, end))


def test_what_python_hands_over_is_checked():
    blocks = Layer.of(300).blocks
    graph = Hnsw.build(blocks).codes.native
    layout = PageLayout(32, 300, 0.8, clustered=True, values=True)
    pages = Clusters._build(blocks, layout)._batches[0].native
    offsets, candidates, chosen = np.zeros(3, np.int64), np.zeros(4, np.int32), np.zeros((2, 4), np.uint32)
    with pytest.raises(ValueError, match="nearest has shape"):
        native.coarse_build(blocks.native, pages, 10, 1, 0.0, np.zeros((1, 2, 299), np.uint16))
    with pytest.raises(ValueError, match="beyond the 10"):
        native.coarse_build(blocks.native, pages, 10, 1, 0.0, np.full((1, 2, 300), 10, np.uint16))
    with pytest.raises(ValueError, match="out has shape"):
        native.copy_keys(blocks.native, 0, 0, np.zeros((1, 127), np.uint8))
    with pytest.raises(ValueError, match="tokens from 299"):
        native.copy_keys(blocks.native, 0, 299, np.zeros((2, 128), np.uint8))
    with pytest.raises(ValueError, match="kv_head"):
        native.graph_choose_links(graph, blocks.native, 2, 0, offsets, candidates, chosen)
    with pytest.raises(ValueError, match="begin"):
        native.graph_choose_links(graph, blocks.native, 0, 299, offsets, candidates, chosen)
    with pytest.raises(ValueError, match="candidates"):
        native.graph_choose_links(graph, blocks.native, 0, 0, offsets, candidates + 300, chosen)
    with pytest.raises(ValueError, match="offsets"):
        native.graph_choose_links(graph, blocks.native, 0, 0, np.array([0, 5, 4]), candidates, chosen)
