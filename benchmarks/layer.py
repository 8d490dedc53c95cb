"""One layer of a workload, stored as a context: sessions over it, and what lies below them, attention of the whole layer or by
what an index finds."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

import kvdb.attention.exact as exact_attention
from benchmarks.workloads import Workload
from indexes.base import Index, Queries, SearchResult
from indexes.retrieval import Retrieval
from kvdb.attention.block_run import Span
from kvdb.attention.exact import AttentionStats
from kvdb.attention.partition import RunPartition, SearchedSpan
from kvdb.attention.query import AttentionQuery
from kvdb.attention.sparse import sparse
from kvdb.config import Config, IndexConfig, WindowConfig
from kvdb.database import Database
from kvdb.session.state import SessionState
from kvdb.types import ModelSpec, Retention
from query_optimizer.query_options import QueryOptions

STEP = 1 << 16


@dataclass(frozen=True)
class Answer:
    """out: `[q_heads, 1, head_dim]` in the layer's dtype. found: by the search, in search_s seconds. whole: whether that was too
    much, so that all was read."""

    out: np.ndarray
    stats: AttentionStats
    found: SearchResult
    search_s: float
    whole: bool


class Layer:
    """A workload's keys and values, and the window that kvdb reads whole by default."""

    def __init__(self, workload: Workload, stored: str = "") -> None:
        """stored: the codec of its blocks, by its name."""
        self.kv_heads, self.tokens, head_dim = workload.k.shape
        self.workload, self.scale = workload, workload.scale
        spec = ModelSpec("benchmark", 1, len(workload.queries), self.kv_heads, head_dim, workload.k.dtype.name)
        self._database, self._ids = (
            Database(Config(indexes=IndexConfig(automatic=False, segment_tokens_min=1))),
            np.arange(self.tokens),
        )
        self._spec = spec
        writer = self._database.begin_import(spec, self._ids, "layer", retention=Retention(format=stored))
        for at in range(0, self.tokens, STEP):  # so that mapped arrays need not be in memory at once
            writer.write(0, *(np.ascontiguousarray(x[:, at : at + STEP]) for x in (workload.k, workload.v)))
        writer.commit()
        session = self.session()
        self._segment = session.views[0].segment
        table = self._segment.tables[0]
        self.layout, self.blocks = table.layout, table.keys(self.tokens)
        self._run = session.layer(0).run
        self._prepared: dict[int, tuple[_Watched, RunPartition]] = {}
        size, window = self.layout.block_size, WindowConfig()
        self.begin = -(-window.sink_tokens // size) * size
        self.end = (self.tokens - window.recent_tokens) // size * size

    def session(self) -> SessionState:
        """A session over the whole layer."""
        return self._database.create_session(self._spec, self._ids)

    def offer(self, index: Index) -> None:
        """Let sessions search an index of these blocks."""
        if self._segment.indexes.of(0).get(index.kind) is not index:
            self._segment.indexes.put(0, index)

    @property
    def window(self) -> tuple[int, int]:
        """The first and the last tokens that are always attended, as indexes.oracle.Oracle takes them."""
        return self.begin, self.tokens - self.end

    def query(self, i: int) -> np.ndarray:
        """`[q_heads, 1, head_dim]` in the layer's dtype."""
        return np.ascontiguousarray(self.workload.queries[:, i : i + 1]).astype(self.workload.k.dtype)

    def queries(self) -> Queries:
        """All of the workload's, seeing everything."""
        return Queries.of(self.workload.queries, self.kv_heads, self.scale, self.tokens)

    @property
    def nbytes(self) -> int:
        return self.tokens * self.kv_heads * self.blocks.token_nbytes

    def exact(self, q: np.ndarray) -> np.ndarray:
        """Exact attention of q, of the same shape and dtype."""
        return exact_attention.exact(self.layout, self._run, q, 0, self.scale)[0].out

    def sparse(self, index: Index, q: np.ndarray, retrieval: Retrieval) -> Answer:
        """What a session does below its checks: the window exactly, of the rest what the index finds."""
        if id(index) not in self._prepared:  # as a session's plan is
            watched = _Watched(index)
            sections = RunPartition([SearchedSpan(watched, Span(self.begin, self.end, 0))], self.layout.block_size)
            self._prepared[id(index)] = watched, sections
        watched, sections = self._prepared[id(index)]
        state, reading = sparse(
            AttentionQuery(self.layout, self._run, q, self.scale, QueryOptions(retrieval)), sections, retrieval
        )
        return Answer(state.out, reading, watched.found, watched.seconds, reading.retrieved == self.tokens)


class _Watched:
    """An index that remembers its last search, and how long it took."""

    found: SearchResult
    seconds: float

    def __init__(self, index: Index) -> None:
        self._index = index

    def search(self, queries: Queries, retrieval: Retrieval, **options: bool) -> SearchResult:
        started = perf_counter()
        self.found = self._index.search(queries, retrieval, **options)
        self.seconds = perf_counter() - started
        return self.found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)


def joined(founds: list[SearchResult]) -> SearchResult:
    """Searches of one query each as one search of all of them."""
    heads, n = founds[0].missed.shape[0], len(founds)
    parts = [(founds[i], founds[i].offsets[h], founds[i].offsets[h + 1]) for h in range(heads) for i in range(n)]
    return SearchResult(
        offsets=np.cumsum([0, *(end - begin for _, begin, end in parts)]).astype(np.int64),
        ids=np.concatenate([found.ids[begin:end] for found, begin, end in parts]),
        scores=np.concatenate([found.scores[begin:end] for found, begin, end in parts]),
        scanned=sum(found.scanned for found in founds),
        nbytes=sum(found.nbytes for found in founds),
        missed=np.concatenate([found.missed for found in founds], axis=1),
        missed_bound=np.concatenate([found.missed_bound for found in founds], axis=1),
        dense=np.concatenate([_none_dense(found) if found.dense is None else found.dense for found in founds], axis=1),
    )


def _none_dense(found: SearchResult) -> np.ndarray:
    return np.zeros(found.missed.shape, np.bool_)
