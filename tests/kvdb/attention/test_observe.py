"""Observations of searches, against numpy on dense attention."""

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
from tests.scan import Scan

BLOCK, TOKENS, HEADS, KV_HEADS = 16, 320, 6, 3
SPEC = kvdb.ModelSpec("m", 1, HEADS, KV_HEADS, 16, "float32")
SCALE = 0.7
ALPHA = 0.05


class Watched(Scan):
    """Leaves the queries of some query heads unanswered."""

    left: tuple[int, ...] = ()

    def search(self, queries, retrieval, **options):
        result = super().search(queries, retrieval, **options)
        if not self.left:
            return result
        dense = np.zeros(queries.q.shape[:2], bool)
        dense[list(self.left)] = True
        counts = np.where(dense.ravel(), 0, np.diff(result.offsets))
        keep = ~np.repeat(dense.ravel(), np.diff(result.offsets))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return replace(result, offsets=offsets, ids=result.ids[keep], scores=result.scores[keep], dense=dense)


class Layer:
    """Segments of 320 tokens and a tail of 5, searched but for the first and the last block of a segment.

    left: of each segment, the query heads that its search leaves.
    """

    def __init__(self, left, seed=0):
        rng = np.random.default_rng(seed)
        n = len(left) * TOKENS + 5
        self.q = rng.standard_normal((HEADS, 1, 16)).astype(np.float32)
        self.k, self.v = (rng.standard_normal((KV_HEADS, n, 16)).astype(np.float32) for _ in range(2))
        self.store = BlockStore(StorageConfig(block_size=BLOCK, arena_bytes=1 << 20))
        self.tables = [self.store.tables(SPEC)[0] for _ in range(len(left) + 1)]
        for i, table in enumerate(self.tables):
            here = slice(i * TOKENS, (i + 1) * TOKENS)
            table.append(self.k[:, here], self.v[:, here])
        self.seen = [[] for _ in left]
        self.searched = np.zeros((len(left), n), bool)
        parts = []
        for i, (heads, table) in enumerate(zip(left, self.tables, strict=False)):
            index = Watched(table.keys(TOKENS))
            index.left = heads
            begin, end = BLOCK, TOKENS - BLOCK
            self.searched[i, i * TOKENS + begin : i * TOKENS + end] = True
            parts.append(SearchedSpan(index, Span(begin, end, i * TOKENS // BLOCK), observe=self.seen[i].append))
        self.partition = RunPartition(parts, BLOCK)

    def ask(self, options, observed=True):
        """The observations of each part."""
        run = BlockRun([(table, TOKENS) for table in self.tables[:-1]], self.tables[-1])
        query = AttentionQuery(self.tables[0].layout, run, self.q, SCALE, options, observed)
        sparse(query, self.partition, options.retrieval)
        return self.seen

    def logits(self):
        """float64 `[q_heads, n]`."""
        keys = self.k.repeat(HEADS // KV_HEADS, axis=0).astype(np.float64)
        return SCALE * np.einsum("hd,htd->ht", self.q[:, 0].astype(np.float64), keys)

    def close(self):
        for table in self.tables:
            table.release()
        self.store.close()


@pytest.fixture
def layer(request):
    made = Layer(request.param)
    yield made
    made.close()


parts = pytest.mark.parametrize("layer", [((),), ((), (), ())], ids=["one part", "three parts"], indirect=True)


@parts
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "options", [QueryOptions(Dipr(ALPHA)), QueryOptions(Dipr(1e-9)), QueryOptions(Dipr(ALPHA), max_missed_mass=1e-4)], ids=str
)
def test_every_measure_is_that_of_dense_attention(layer, seed, options):
    layer.q = np.random.default_rng(seed).standard_normal(layer.q.shape).astype(np.float32)
    logits = layer.logits()
    top = logits.max(axis=1, keepdims=True)
    chosen = logits >= top + np.log(options.retrieval.alpha)
    sharpness = 1 / np.exp(logits - top).sum(axis=1)
    in_window = ~layer.searched.any(axis=0)[logits.argmax(axis=1)]
    for part, shown in enumerate(layer.ask(options)):
        (one,) = shown
        assert one.seen is None
        retrieved, dense, sharp, window = one.values
        assert retrieved == pytest.approx((chosen & layer.searched[part]).sum(axis=1) / (TOKENS - 2 * BLOCK), rel=1e-6)
        assert not dense.any()
        assert sharp == pytest.approx(sharpness, rel=1e-4)
        assert window.tolist() == in_window.tolist()


@parts
def test_a_window_that_holds_the_largest_is_a_hit(layer):
    for at, hit in ((0, True), (TOKENS - 1, True), (layer.k.shape[1] - 1, True), (BLOCK, False), (TOKENS - BLOCK - 1, False)):
        q = 9 * layer.k[:, at].repeat(HEADS // KV_HEADS, axis=0) / np.linalg.norm(layer.k[:, at], axis=-1).repeat(2)[:, None]
        layer.q = q[:, None].astype(np.float32)
        largest_at = layer.logits().argmax(axis=1)
        heads = np.flatnonzero(largest_at == at)
        assert len(heads)
        for shown in layer.ask(QueryOptions(TopK(3))):
            assert (shown.pop().values[3][heads] == hit).all()


@pytest.mark.parametrize("layer", [((),)], indirect=True)
def test_only_observed_questions_are_shown(layer):
    assert layer.ask(QueryOptions(TopP(0.9)), observed=False) == [[]]


LEFT = [((1,),), ((0, 2, 4, 5),), (tuple(range(HEADS)),), ((1,), (3,)), ((), (0, 1, 4))]


@pytest.mark.parametrize("layer", LEFT, ids=str, indirect=True)
def test_queries_that_were_left_are_dense_and_reading_everything_measures_them(layer):
    logits = layer.logits()
    sharpness = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    in_window = ~layer.searched.any(axis=0)[logits.argmax(axis=1)]
    for part, shown in zip(layer.partition.searched, layer.ask(QueryOptions(Dipr(ALPHA))), strict=True):
        (one,) = shown
        assert one.seen is None
        retrieved, dense, sharp, window = one.values
        left = np.isin(np.arange(HEADS), part.index.left)
        assert dense.tolist() == left.tolist()
        assert (retrieved[left] == 1).all()
        assert (retrieved[~left] < 1).all()
        assert sharp == pytest.approx(sharpness, rel=1e-4)
        assert window.tolist() == in_window.tolist()


@pytest.mark.parametrize("layer", [((), tuple(range(HEADS)), ())], indirect=True)
def test_parts_behind_one_that_left_everything_are_not_observed(layer):
    assert [len(shown) for shown in layer.ask(QueryOptions(Dipr(ALPHA)))] == [1, 1, 0]
