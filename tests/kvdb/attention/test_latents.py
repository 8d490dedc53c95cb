"""Layers whose values are not as keys are, and logits without a value: read whole, searched, and estimated."""

from dataclasses import replace

import numpy as np
import pytest

import indexes.registry as registry
from indexes.retrieval import Dipr, TopK, TopP
from kvdb.attention import AttentionState, merge
from kvdb.attention.block_run import BlockRun, Span
from kvdb.attention.partition import RunPartition, SearchedSpan
from kvdb.attention.query import AttentionQuery
from kvdb.attention.sparse import exact, sparse
from kvdb.attention.state import with_sinks
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import CpuBudget
from kvdb.storage.cpu import CpuTier
from query_optimizer.query_options import QueryOptions
from tests.reference import TOLERANCE, attention, relative_error

BLOCK, TOKENS, TAIL, HEADS, KV_HEADS = 16, 960, 21, 6, 2
SHAPES = {"symmetric": (32, 32, False), "shorter": (24, 16, False), "longer": (16, 40, False), "latents": (96, 64, True)}
KINDS = [kind for kind in registry.KINDS if kind != "quantized"]
SINKS = np.array([1.5, -np.inf, -3, 4, 0, 2], np.float32)


class Layer:
    """A segment and a tail. Keys lie in some directions, into which queries look."""

    def __init__(self, of):
        head_dim, value_dim, in_keys = of
        rng, n = np.random.default_rng(3), TOKENS + TAIL
        self.scale = head_dim**-0.5
        directions = rng.standard_normal((KV_HEADS, 16, head_dim))
        chosen = rng.integers(0, 16, (KV_HEADS, n, 1))
        self.k = (np.take_along_axis(directions, chosen, 1) + 0.3 * rng.standard_normal((KV_HEADS, n, head_dim))).astype(
            np.float32
        )
        self.v = self.k[..., :value_dim] if in_keys else rng.standard_normal((KV_HEADS, n, value_dim)).astype(np.float32)
        q = np.repeat(directions[:, :2], HEADS // KV_HEADS, 0).reshape(KV_HEADS, HEADS // KV_HEADS, 2, head_dim)
        self.q = (2 * q + 0.3 * rng.standard_normal(q.shape)).reshape(HEADS, 2, head_dim).astype(np.float32)
        self.layout = BlockLayout("float32", KV_HEADS, head_dim, BLOCK, "", value_dim, in_keys)
        self.tier = CpuTier(self.layout.nbytes, 1 << 20, CpuBudget(1 << 26))
        self.tables = [BlockTable(self.tier, self.layout) for _ in range(2)]
        for table, part in zip(self.tables, (slice(0, TOKENS), slice(TOKENS, n)), strict=True):
            table.append(self.k[:, part], None if in_keys else self.v[:, part])
        self.run = BlockRun([(self.tables[0], TOKENS)], self.tables[1])

    def partition(self, kind):
        index = registry.build(kind, self.tables[0].keys(TOKENS))
        return RunPartition([SearchedSpan(index, Span(BLOCK, TOKENS - BLOCK, 0))], BLOCK)

    def query(self, retrieval, n=1, **more):
        return AttentionQuery(self.layout, self.run, self.q[:, :n], self.scale, QueryOptions(retrieval), **more)

    def close(self):
        for table in self.tables:
            table.release()
        self.tier.close()


@pytest.fixture(params=SHAPES, scope="module")
def layer(request):
    made = Layer(SHAPES[request.param])
    yield made
    made.close()


def truth(layer, n=1, sinks=None, window=0):
    out, lse = [], []
    for i in range(n):
        end = TOKENS + TAIL - n + 1 + i
        seen = slice(max(0, end - window) if window else 0, end)
        one = AttentionState(*attention(layer.q[:, i : i + 1], layer.k[:, seen], layer.v[:, seen], layer.scale))
        one = one if sinks is None else with_sinks(one, sinks)
        out.append(one.out)
        lse.append(one.lse)
    return np.concatenate(out, 1), np.concatenate(lse, 1)


def close_to(state, expected):
    assert relative_error(state.out, expected[0]) <= TOLERANCE["float32"]
    np.testing.assert_allclose(state.lse, expected[1], rtol=1e-5, atol=1e-4)


def test_tokens_are_read_as_they_were_appended(layer):
    k, v = layer.tables[0].read(5, 100)
    assert np.array_equal(k, layer.k[:, 5:105])
    assert np.array_equal(v, layer.v[:, 5:105])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("window", [0, 1, 30, 500])
def test_everything_is_read(layer, n, sinks, window):
    query = layer.query(None, n, sinks=sinks, window=window)
    state, stats = exact(query, RunPartition([], BLOCK))
    close_to(state, truth(layer, n, sinks, window))
    assert stats.scanned == (min(window + n - 1, TOKENS + TAIL) if window else TOKENS + TAIL)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_a_search_that_finds_everything_is_exact(layer, kind, sinks, monkeypatch):
    monkeypatch.setattr("kvdb.attention.step.FOUND_SHARE_MAX", 1.0)
    query = layer.query(TopK(TOKENS), 2, sinks=sinks)
    state, stats = sparse(query, layer.partition(kind), query.options.retrieval)
    close_to(state, truth(layer, 2, sinks))
    assert stats.missed == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retrieval", [Dipr(0.05), TopK(40), TopP(0.8)])
def test_bounds_hold_where_sinks_weigh(layer, kind, retrieval, monkeypatch):
    query = layer.query(retrieval, sinks=SINKS)
    monkeypatch.setattr("kvdb.attention.step.FOUND_SHARE_MAX", 1.0)
    monkeypatch.setattr("kvdb.attention.step.WHOLE_SHARE_MAX", 1.0)
    state, stats = sparse(query, layer.partition(kind), retrieval)
    _, lse = truth(layer, 1, SINKS)
    missed = 1 - np.exp(np.minimum(stats.lse - lse, 0))
    assert missed.mean() <= stats.missed_bound + 1e-4
    plain, _ = sparse(replace(query, sinks=None), layer.partition(kind), retrieval)
    assert np.isfinite(state.out).all()
    assert (state.lse >= plain.lse - 1e-3).all()


def test_estimates_bring_the_output_nearer(layer, monkeypatch):
    monkeypatch.setattr("kvdb.attention.step.FOUND_SHARE_MAX", 1.0)
    query = layer.query(TopK(4), sinks=SINKS)
    partition, expected = layer.partition("coarse-clusters"), truth(layer, 1, SINKS)[0]
    plain, _ = sparse(query, partition, TopK(4))
    estimated = replace(query, options=replace(query.options, estimate_tail=True))
    state, stats = sparse(estimated, partition, TopK(4))
    assert stats.missed > 0
    assert relative_error(state.out, expected) < relative_error(plain.out, expected) / 2


def test_a_window_is_never_searched(layer):
    partition = layer.partition("flat")
    assert layer.query(Dipr(), window=0).searches(partition)
    assert not layer.query(Dipr(), window=5).searches(partition)


def test_a_sink_is_a_part_without_a_value():
    rng = np.random.default_rng(0)
    state = AttentionState(rng.standard_normal((6, 2, 8)).astype(np.float32), rng.standard_normal((6, 2)).astype(np.float32))
    state.lse[4] = -np.inf
    state.out[4] = 0
    sunk = with_sinks(state, SINKS)
    sink = AttentionState(np.zeros_like(state.out), np.broadcast_to(SINKS[:, None], (6, 2)))
    merged = merge([state, sink])
    np.testing.assert_allclose(sunk.out, merged.out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sunk.lse, merged.lse, rtol=1e-5, atol=1e-6)
    nothing = with_sinks(AttentionState(np.zeros((1, 1, 8), np.float32), np.full((1, 1), -np.inf, np.float32)), SINKS[1:2])
    assert nothing.lse == -np.inf
