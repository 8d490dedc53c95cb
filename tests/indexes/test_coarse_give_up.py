"""What coarse indexes leave to an exact read, and what they say of it."""

import numpy as np
import pytest

from indexes.base import Queries
from indexes.blocks import Blocks
from indexes.coarse.bounds import Bounds
from indexes.coarse.clusters import Clusters
from indexes.coarse.means import Means
from indexes.retrieval import Dipr, Exact, TopK, TopP
from tests.indexes.coarse_data import Layer, check_rows, log_sum, rows, same_set, wanted

KINDS = [Bounds, Means, Clusters]
TOKENS = 8192
SHARP, DIFFUSE = 3.0, 0.02
"""Times a query: it wants a few tokens, or nearly all of them alike."""


@pytest.fixture(scope="module")
def layer():
    return Layer.of(TOKENS, "bfloat16", topics=60)


@pytest.fixture(scope="module")
def built(layer):
    sizes = {Bounds: 16, Means: 8, Clusters: 16}  # fewer tokens than a topic has in a segment
    return {kind: kind.build(layer.blocks, page_size=sizes[kind], segment_tokens=2048) for kind in KINDS}


def queries(layer, factors, **kwargs):
    """The layer's, times a factor for each KV head."""
    q = layer.q * np.repeat(np.asarray(factors, np.float32), 2)[:, None, None]
    return Layer(layer.blocks, q.astype(np.float32)).queries(**kwargs)


@pytest.mark.parametrize("retrieval", [Exact(), Dipr(0.05), TopK(6000), TopP(0.95)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_wants_much_is_left_unanswered(layer, built, kind, retrieval):
    asked = queries(layer, [DIFFUSE, DIFFUSE])
    found = built[kind].search(asked, retrieval, give_up=True)
    x = check_rows(layer.blocks, asked, found)
    assert found.dense.dtype == bool
    assert found.dense.shape == (4, 2)
    assert found.dense.all()
    assert len(found.ids) == 0
    for row, missed in enumerate(found.missed.reshape(-1)):
        assert kind is Bounds or missed == pytest.approx(log_sum(x[row], asked.scale), abs=0.1)
    exact_nbytes = TOKENS * layer.blocks.kv_heads * layer.blocks.token_nbytes
    assert found.nbytes < 0.4 * exact_nbytes  # the representatives, in keys of 32 channels; no key


LITTLE = [(kind, retrieval) for kind in (Means, Clusters) for retrieval in (Dipr(0.2), TopK(12))]


@pytest.mark.parametrize(("kind", "retrieval"), [*LITTLE, (Clusters, TopP(0.5))])
def test_what_wants_little_is_answered_as_ever(layer, built, kind, retrieval):
    asked = queries(layer, [SHARP, SHARP])
    found, plain = (built[kind].search(asked, retrieval, give_up=give_up) for give_up in (True, False))
    assert found.dense is not None
    assert not found.dense.any()
    assert plain.dense is None
    assert np.array_equal(found.ids, plain.ids)
    assert np.array_equal(found.offsets, plain.offsets)
    assert np.array_equal(found.missed, plain.missed)


def test_what_is_answered_is_answered_in_full():
    """Where much is read, a search without `give_up` gives pages less of their reach; one with it does not."""
    layer = Layer.of(65_536, n=1, topics=14)  # a topic is more than a row reads freely, two are worth a search
    index = Clusters.build(layer.blocks, margin=1.0)
    asked = layer.queries()
    found = index.search(asked, Dipr(1e-4), give_up=True)
    x = check_rows(layer.blocks, asked, found)
    answered = np.flatnonzero(~found.dense.reshape(-1))
    assert len(answered) > 0
    for row in answered:
        assert same_set(x[row], rows(found)[row], wanted(x[row], Dipr(1e-4), asked.scale))


@pytest.mark.parametrize("tail", [False, True])
def test_each_kv_head_for_itself(layer, built, tail):
    asked = queries(layer, [SHARP, DIFFUSE])
    found = built[Clusters].search(asked, Dipr(0.2), give_up=True, estimate_tail=tail)
    x = check_rows(layer.blocks, asked, found)
    assert np.array_equal(found.dense, [[False] * 2] * 2 + [[True] * 2] * 2)
    for row, ids in enumerate(rows(found)):
        if row < 4:
            assert same_set(x[row], ids, wanted(x[row], Dipr(0.2), asked.scale))
        else:
            assert len(ids) == 0
    if tail:  # of a head that was left: of everything
        for row in range(4, 8):
            values = layer.blocks.values(1)
            weights = np.exp(asked.scale * (x[row] - x[row].max()))
            truth = weights @ values / weights.sum()
            assert np.linalg.norm(found.tail.reshape(8, 32)[row] - truth) < 0.2 * np.linalg.norm(truth)


def test_the_last_few_kv_heads_go_with_most():
    layer = Layer.of(TOKENS)
    k = np.stack([layer.blocks.keys(h) for h in (0, 1, 0)])
    blocks = Blocks.of(k)
    index = Clusters.build(blocks)
    for factors, dense in ([(SHARP, SHARP, DIFFUSE), [0, 0, 1]], [(SHARP, DIFFUSE, DIFFUSE), [1, 1, 1]]):
        q = np.concatenate([layer.q, layer.q[:2]]) * np.repeat(factors, 2)[:, None, None]
        found = index.search(Queries.of(q, 3, 32**-0.5, TOKENS), Dipr(0.2), give_up=True)
        assert np.array_equal(found.dense[:, 0], np.repeat(dense, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retrieval", [Exact(), Dipr(0.05), TopK(4000), TopP(0.95)])
def test_few_tokens_are_always_answered(kind, retrieval):
    layer = Layer.of(4095)
    index = kind.build(layer.blocks)
    asked = queries(layer, [DIFFUSE, DIFFUSE])
    found, plain = (index.search(asked, retrieval, give_up=give_up) for give_up in (True, False))
    assert not found.dense.any()
    assert np.array_equal(found.ids, plain.ids)


def test_what_a_query_does_not_see_counts_for_nothing(layer, built):
    """Neither for what is wanted nor for what an exact read would cost."""
    hidden = np.ones(TOKENS, bool)
    hidden[5000:5100] = False
    found = built[Clusters].search(queries(layer, [DIFFUSE, DIFFUSE], hidden=hidden), Dipr(0.05), give_up=True)
    assert not found.dense.any()
    found = built[Clusters].search(queries(layer, [DIFFUSE, DIFFUSE], begin=2000, end=3000), Dipr(0.05), give_up=True)
    assert found.dense.all()


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_a_rest_of_which_means_say_nothing_is_not_estimated(factor):
    """Keys that have nothing to do with each other: without the exact read outputs were off by 69 to 93 %."""
    rng = np.random.default_rng(0)
    blocks = Blocks.of(*rng.standard_normal((2, 2, 8192, 128)).astype(np.float32))
    asked = Queries.of(factor * rng.standard_normal((4, 2, 128)).astype(np.float32), 2, 128**-0.5, 8192)
    index = Clusters.build(blocks)
    assert index.search(asked, TopK(64), estimate_tail=True, give_up=True).dense.all()
    assert not index.search(asked, TopK(64), give_up=True).dense.any()  # literally what was asked for


def test_a_rest_of_tokens_that_weigh_alike_is_estimated(layer, built):
    found = built[Clusters].search(queries(layer, [0.2, 0.2]), TopK(64), estimate_tail=True, give_up=True)
    assert not found.dense.any()
