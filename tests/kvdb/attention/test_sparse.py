"""Searches over several parts: what they read, and what they say they left out."""

from dataclasses import replace

import numpy as np
import pytest

import kvdb
from indexes.retrieval import Dipr, TopK, TopP
from kvdb.attention.block_run import BlockRun, Span
from kvdb.attention.partition import RunPartition, SearchedSpan
from kvdb.attention.query import AttentionQuery
from kvdb.attention.sparse import sparse
from kvdb.config import StorageConfig
from kvdb.storage.store import BlockStore
from query_optimizer.query_options import QueryOptions
from tests.reference import attention, relative_error
from tests.scan import Scan

BLOCK, PARTS, TOKENS = 16, 3, 320
SPEC = kvdb.ModelSpec("m", 1, 1, 1, 16, "float32")
SCALE = SPEC.softmax_scale


class Layer:
    """Three segments of 320 tokens and a tail of 5, with an index over all of a segment but its first and last block.

    weights: scores of chosen tokens, which are aimed at by their keys; all others are near -30.
    """

    def __init__(self, weights):
        rng = np.random.default_rng(3)
        n = PARTS * TOKENS + 5
        self.q = np.zeros((1, 1, 16), np.float32)
        self.q[..., 0] = 1 / SCALE
        self.k = rng.standard_normal((1, n, 16)).astype(np.float32) * 0.1
        self.k[0, :, 0] -= 30
        self.v = rng.standard_normal((1, n, 16)).astype(np.float32)
        for token, logit in weights.items():
            self.k[0, token, 0] = logit
        self.store = BlockStore(StorageConfig(block_size=BLOCK, arena_bytes=1 << 20))
        self.tables = [self.store.tables(SPEC)[0] for _ in range(PARTS + 1)]
        for i, table in enumerate(self.tables):
            part = slice(i * TOKENS, (i + 1) * TOKENS)
            table.append(self.k[:, part], self.v[:, part])
        self.layout = self.tables[0].layout
        self.run = BlockRun([(table, TOKENS) for table in self.tables[:-1]], self.tables[-1])
        blocks = TOKENS // BLOCK
        searched = [
            SearchedSpan(Scan(table.keys(TOKENS)), Span(BLOCK, TOKENS - BLOCK, i * blocks))
            for i, table in enumerate(self.tables[:-1])
        ]
        self.partition = RunPartition(searched, BLOCK)

    def ask(self, wanted):
        return sparse(AttentionQuery(self.layout, self.run, self.q, SCALE, wanted), self.partition, wanted.retrieval)

    def truth(self, attended):
        """The share of the mass outside of these tokens, and the attention over them."""
        logits = SCALE * (self.k[0].astype(np.float64) @ self.q[0, 0])
        mass = np.exp(logits - logits.max())
        out, _ = attention(self.q, self.k[:, attended], self.v[:, attended], SCALE)
        return 1 - mass[attended].sum() / mass.sum(), out

    def whole(self):
        """The tokens that no index covers."""
        t = np.arange(PARTS * TOKENS + 5)
        return (t % TOKENS < BLOCK) | (t % TOKENS >= TOKENS - BLOCK) | (t >= PARTS * TOKENS)

    def close(self):
        for table in self.tables:
            table.release()
        self.store.close()


FOUND = {40: 5.0, 41: 2.0, 400: 8.0, 401: 4.5, 720: 9.0, 721: 7.5}
"""The first segment's largest is far below the last's, so that what is found in it is not wanted once all is known."""

ASKED = {
    "dipr": (Dipr(0.1), [400, 720, 721]),
    "a wide dipr": (Dipr(0.001), [40, 400, 401, 720, 721]),
    "top_k": (TopK(2), [400, 720]),
    "top_p": (TopP(0.999), None),
}


@pytest.fixture
def layer():
    made = Layer(FOUND)
    yield made
    made.close()


@pytest.mark.parametrize("asked", ASKED)
def test_the_wanted_tokens_of_all_parts_are_read_and_the_rest_is_told(layer, asked):
    retrieval, tokens = ASKED[asked]
    state, reading = layer.ask(QueryOptions(retrieval))
    if tokens is None:
        assert reading.missed_bound_max <= 0.03  # loose by a factor of e**3
        assert reading.missed <= 0.001
        return
    attended = layer.whole()
    attended[tokens] = True
    share, out = layer.truth(attended)
    assert relative_error(state.out, out) <= 1e-5
    assert reading.missed == pytest.approx(share, rel=1e-3)
    assert share <= reading.missed_bound == reading.missed_bound_max
    assert reading.retrieved == attended.sum()
    assert reading.scanned == PARTS * TOKENS + 5


def test_it_reads_on_until_the_bound_holds(layer):
    _, first = layer.ask(QueryOptions(Dipr(0.5)))
    _, tight = layer.ask(QueryOptions(Dipr(0.5), first.missed * 1.01))
    _, wider = layer.ask(QueryOptions(Dipr(0.5), 1e-3))
    assert tight.retrieved == first.retrieved
    assert tight.nbytes > first.nbytes
    assert wider.retrieved > first.retrieved
    assert wider.missed_bound_max <= 1e-3


def test_a_bound_that_cannot_hold_reads_everything(layer):
    state, reading = layer.ask(QueryOptions(TopK(1), 1e-15))
    dense, _ = attention(layer.q, layer.k, layer.v, SCALE)
    assert relative_error(state.out, dense) <= 1e-5
    assert (reading.missed, reading.missed_bound_max, reading.retrieved) == (0, 0, PARTS * TOKENS + 5)


def test_the_estimate_of_what_was_not_found_completes_the_output(layer):
    """The stand-in's estimate is the truth, and nothing that was found is thrown away for it."""
    state, _ = layer.ask(QueryOptions(Dipr(0.5), estimate_tail=True))
    dense, lse = attention(layer.q, layer.k, layer.v, SCALE)
    assert relative_error(state.out, dense) <= 1e-5
    assert state.lse == pytest.approx(lse, abs=1e-4)


def test_where_everything_is_alike_everything_is_read():
    flat = Layer(dict.fromkeys(range(PARTS * TOKENS + 5), 1.0))
    state, reading = flat.ask(QueryOptions(Dipr(0.012)))
    dense, _ = attention(flat.q, flat.k, flat.v, SCALE)
    assert relative_error(state.out, dense) <= 1e-5
    assert reading.retrieved == PARTS * TOKENS + 5
    flat.close()


class GivesUp(Scan):
    """Leaves the queries of some query heads unanswered."""

    heads: tuple[int, ...] = ()

    def search(self, queries, retrieval, **options):
        assert options["give_up"]
        result = super().search(queries, retrieval, **options)
        dense = np.zeros(queries.q.shape[:2], bool)
        dense[list(self.heads)] = True
        keep = ~np.repeat(dense.ravel(), np.diff(result.offsets))
        counts = np.where(dense.ravel(), 0, np.diff(result.offsets))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return replace(result, offsets=offsets, ids=result.ids[keep], scores=result.scores[keep], dense=dense)


@pytest.mark.parametrize("dense", [(0,), (3, 4), (0, 2, 5), tuple(range(8))], ids=str)
def test_kv_heads_that_an_index_gives_up_are_read_whole(dense):
    spec = kvdb.ModelSpec("m", 1, 8, 4, 16, "float32")
    rng = np.random.default_rng(1)
    k, v, q = (rng.standard_normal((heads, n, 16)).astype(np.float32) for heads, n in ((4, 320), (4, 320), (8, 1)))
    store = BlockStore(StorageConfig(block_size=BLOCK, arena_bytes=1 << 20))
    segment, tail = store.tables(spec)[0], store.tables(spec)[0]
    segment.append(k, v)
    index = GivesUp(segment.keys(320))
    index.heads = dense
    run, sections = BlockRun([(segment, 320)], tail), RunPartition([SearchedSpan(index, Span(BLOCK, 320 - BLOCK, 0))], BLOCK)
    state, reading = sparse(AttentionQuery(segment.layout, run, q, 0.25, QueryOptions(TopK(2))), sections, TopK(2))
    whole, _ = attention(q, k, v, 0.25)
    kv_heads = sorted({head // 2 for head in dense})
    for head in range(8):
        error = relative_error(state.out[head], whole[head])
        assert error <= 1e-5 if head // 2 in kv_heads or len(kv_heads) > 2 else error > 0.1
    assert (reading.missed == 0) == (len(kv_heads) > 2)
    assert reading.retrieved <= 320 <= reading.scanned
    assert reading.retrieved == (320 if len(kv_heads) > 2 else 2 * BLOCK + 2 * (4 - len(kv_heads)) / 4 + 288 * len(kv_heads) / 4)
    for table in (segment, tail):
        table.release()
    store.close()
