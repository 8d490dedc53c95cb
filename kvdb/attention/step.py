"""A decode step by native code: window, searches, merges and estimates are one call, prepared once for a plan.

It answers one query, where every index that the plan searches can be asked by native code. What is rare is left to
`kvdb.attention.sparse`, which does the same from Python: several queries, a bound on the missed mass that one search does not
prove, and kinds of index that are written in Python.
"""

from collections.abc import Sequence
from math import inf
from time import perf_counter_ns
from typing import overload

import numpy as np

import kvdb._native as _native
from indexes.base import SearchResult
from indexes.retrieval import Dipr, Exact, Retrieval, TopK
from indexes.searcher import searcher_of
from kvdb.attention.exact import AttentionStats, IndexSearch
from kvdb.attention.observation import Observation
from kvdb.attention.partition import RunPartition, SearchedSpan
from kvdb.attention.search import FOUND_SHARE_MAX, WHOLE_SHARE_MAX, AttentionQuery, shared_retrieval
from kvdb.attention.signs import SIGNS
from kvdb.attention.state import AttentionState
from kvdb.types import MEASURES, Float32, bits
from query_optimizer.query_options import QueryOptions


class PreparedStep:
    """A plan's step. searched: the parts that are searched, with the retrieval of each."""

    def __init__(self, native: _native.Step, searched: Sequence[tuple[SearchedSpan, Retrieval]]) -> None:
        self.native = native
        self._searched = searched

    def observe(self, observations: Sequence[tuple[int, bytes, bytes]]) -> None:
        """Tell the parts what the searches of observed queries showed, as `_native.Step.observations` has it."""
        for number, values, seen in observations:
            observe = self._searched[number][0].observe
            assert observe is not None
            known = np.frombuffer(seen, np.bool_).reshape(len(MEASURES), -1) if seen else None
            observe(Observation(np.frombuffer(values, np.float32).reshape(len(MEASURES), -1), known))

    def observe_whole(self, searches: Sequence[IndexSearch], top: Float32, lse: Float32) -> None:
        """Tell the parts what an observed query showed for which everything was read in the end. searches: of the statistics.
        top, lse: float32 `[q_heads, 1]`, over everything."""
        assert isinstance(searches, StepSearches)
        self.observe(self.native.observations(searches.result, top, lse))

    def answer(self, query: AttentionQuery) -> tuple[AttentionState | None, AttentionStats]:
        """The state, or None where everything is to be read, or where the bound on the missed mass is not proven, which the
        statistics say; then they are of what was spent to find that out. Raises NonFiniteError."""
        started = perf_counter_ns()
        q, run = query.q, query.run
        out, logs = np.empty(q.shape, q.dtype), np.empty((3, q.shape[0], 1), np.float32)
        result = self.native.run(bits(q), run.addresses, run.counts, bits(out), logs, query.observed, query.judged)
        searches = StepSearches(self._searched, result)
        if result.end == _native.StepEnd.not_finite:
            logs[0] = np.nan
        lse, read, missed = logs
        if query.observed and result.end == _native.StepEnd.answered:
            self.observe(self.native.observations(result, None, np.logaddexp(read, missed)))
        signs, unlike = result.signs(), result.unlike()
        stats = AttentionStats(
            scanned=result.scanned,
            retrieved=result.retrieved,
            nbytes=result.nbytes,
            kernel_ns=perf_counter_ns() - started,
            missed=result.missed,
            missed_bound=result.bound,
            missed_bound_max=result.bound_max,
            searches=searches,
            lse=read,
            missed_log=missed,
            signs=signs.reshape(SIGNS, -1, 1) if len(signs) else None,
            unlike=unlike.view(np.bool_) if unlike.any() else None,
            search_ns=result.search_ns,
            gather_ns=result.gather_ns,
        )
        ended = result.end in {_native.StepEnd.reads_everything, _native.StepEnd.bound_exceeded}
        return None if ended else AttentionState(out, lse), stats

    @staticmethod
    def exceeded(searches: Sequence[IndexSearch]) -> bool:
        """Whether an answer's searches did not prove the bound on the missed mass."""
        return isinstance(searches, StepSearches) and searches.result.end == _native.StepEnd.bound_exceeded


class StepSearches(Sequence[IndexSearch]):
    """The searches of a step, whose results are made when they are asked for."""

    def __init__(self, searched: Sequence[tuple[SearchedSpan, Retrieval]], result: _native.StepResult) -> None:
        self._searched = searched
        self.result = result

    def __len__(self) -> int:
        return self.result.searches

    @overload
    def __getitem__(self, number: int) -> IndexSearch: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[IndexSearch]: ...
    def __getitem__(self, number: int | slice) -> IndexSearch | Sequence[IndexSearch]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        part, retrieval = self._searched[number]
        offsets, ids, scores, scanned, nbytes, missed, bound, tail, dense, ns = self.result.found(number)
        shape = len(offsets) - 1, 1
        tails = tail.reshape(*shape, -1) if tail.size else None
        flags = dense.view(np.bool_).reshape(shape)
        found = SearchResult(offsets, ids, scores, scanned, nbytes, missed.reshape(shape), bound.reshape(shape), tails, flags)
        return IndexSearch(part, retrieval, found, ns)


def prepared_step(query: AttentionQuery, partition: RunPartition, retrieval: Retrieval) -> PreparedStep | None:
    """The step of a partition, made when it is first asked for; None where the query is for Python."""
    if query.q.shape[1] != 1 or (query.options.max_missed_mass is not None and partition.widens):
        return None
    key = query.options, retrieval
    if partition.step is None or partition.step[0] != key:
        partition.step = key, _prepare(query, partition, retrieval)
    return partition.step[1]


def made_step(partition: RunPartition, options: QueryOptions, retrieval: Retrieval) -> PreparedStep | None:
    """The step of a partition, if it was made for these options and answers by itself."""
    if (
        partition.step is None
        or (options.max_missed_mass is not None and partition.widens)
        or partition.step[0] != (options, retrieval)
    ):
        return None
    made: PreparedStep | None = partition.step[1]
    return made


def _search(
    query: AttentionQuery, partition: RunPartition, part: SearchedSpan, retrieval: Retrieval
) -> tuple[object, ...] | None:
    """One part as `_native.Step` takes it; None where only Python can search it."""
    tail = part.index.estimates_tail and (part.estimate_tail or query.options.estimate_tail)
    searcher = searcher_of(part.index, retrieval, query.scale, estimate_tail=tail)
    if searcher is None:
        return None
    blocks = tuple(partition.blocks(query.run, part.span))
    turn = None if part.turn is None else (part.turn.cos, part.turn.sin, part.turn.interleaved)
    cut = None if query.options.estimate_tail else _cut(retrieval, query.scale)
    asked = part.active_heads, part.hidden, part.observe is not None, turn, cut
    return searcher, part.span.begin, part.span.end, blocks, *asked


def _cut(retrieval: Retrieval, scale: float) -> tuple[_native.StepCut, float] | None:
    """Which of the tokens found count once all searches were made, as `kvdb.attention.merge_found` has it; None for all."""
    match retrieval:
        case Dipr():
            return _native.StepCut.range, retrieval.beta(scale)
        case TopK(k):
            return _native.StepCut.top_k, float(k)
    return None


def _prepare(query: AttentionQuery, partition: RunPartition, retrieval: Retrieval) -> PreparedStep | None:
    layout, run = query.layout, query.run
    searched, searches, limit = [], [], query.options.max_missed_mass
    for part in partition.searched:
        own = part.retrieval if limit is None else None
        asked = shared_retrieval(own or retrieval, partition)
        search = _search(query, partition, part, asked)
        if search is None or isinstance(retrieval, Exact):
            return None
        searched.append((part, asked))
        searches.append(search)
    apart = partition.sinks and query.ignores_sinks
    window, grows_from = (partition.fixed_window_behind_sinks if apart else partition.fixed_window)(run)
    native = _native.Step(
        layout.native,
        query.q.shape[0],
        query.scale,
        tuple(window),
        grows_from,
        tuple(partition.sink_blocks(run)) if apart else None,
        searches,
        [(tuple(partition.blocks(run, part.span)), part.span.tokens, part.heads) for part in partition.whole],
        partition.tokens,
        partition.guards,
        None if partition.device is not None else partition.ranges,
        FOUND_SHARE_MAX,
        WHOLE_SHARE_MAX,
        inf if limit is None else limit,
    )
    return PreparedStep(native, searched)
