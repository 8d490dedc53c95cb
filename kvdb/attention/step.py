"""Queries that are searched for, by native code: window, searches, merges and estimates are one call, prepared once for a plan.

Several queries are as many steps in one call, each of which sees what came before it; those that ask one index for the same are
searched together.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, overload

import numpy as np

import kvdb._native as _native
from indexes.base import SearchResult
from indexes.retrieval import Dipr, Retrieval, TopK, TopP
from indexes.searcher import searcher_of
from kvdb.attention.exact import IndexSearch
from kvdb.attention.observation import Observation
from kvdb.attention.partition import RunPartition, SearchedSpan
from kvdb.attention.query import AttentionQuery
from kvdb.types import MEASURES, Array, Float32, bits
from query_optimizer.query_options import QueryOptions

FOUND_SHARE_MAX = 0.04
"""If more than this share of the searched tokens was found, reading all of them costs less than picking the found ones."""
WHOLE_SHARE_MAX = 0.5
"""If more than this share of the KV heads is to be read whole, all are, because a page holds the tokens of all heads."""
STEPS_MAX = 64
"""So many steps of one partition are kept: some options, each with a few retrievals."""


class StepAnswers(NamedTuple):
    """Answers to some queries of a call. results: of each. out: `[queries, q_heads, value_dim]`. logs: float32 `[queries, 3,
    q_heads]`, of the answer, of what was read, and of what was left out, see `_native.Step.run`. searches: of each result."""

    results: Sequence[_native.StepResult]
    out: Array
    logs: Float32
    searches: "Sequence[StepSearches]"


class PreparedStep:
    """A plan's step. searched: the parts that are searched, with the retrieval of each."""

    def __init__(self, native: _native.Step, searched: Sequence[tuple[SearchedSpan, Retrieval]]) -> None:
        self.native = native
        self._searched = searched

    def run(self, query: AttentionQuery, queries: Sequence[int], *, causal: bool, observed: bool = False) -> StepAnswers:
        """Answer some queries of the call. queries: their numbers. causal: whether each sees the window up to its own token
        alone. observed: whether `observe` follows."""
        run, heads, value_dim = query.run, len(query.q), query.layout.value_dim
        out = np.empty((len(queries) * heads, 1, value_dim), query.q.dtype)
        logs = np.empty((len(queries), 3, heads), np.float32)
        asked = bits(query.q), list(queries), causal, run.addresses, run.counts
        results = self.native.run(*asked, bits(out), logs, observed, query.judged, query.sinks)
        searches = [StepSearches(self._searched, result) for result in results]
        return StepAnswers(results, out.reshape(len(queries), heads, value_dim), logs, searches)

    def observe(self, result: _native.StepResult, top: Float32 | None, lse: Float32) -> None:
        """Tell the parts what an observed query showed. top: the largest q.k over everything, None for that of what was read and
        found. lse: over everything, as far as it is known. Both float32 `[q_heads, 1]`."""
        self.tell(self.native.observations(result, top, lse))

    def tell(self, observations: Sequence[tuple[int, bytes, bytes]]) -> None:
        """Tell the parts observations, as `_native.Step.observations` has them."""
        for number, values, seen in observations:
            observe = self._searched[number][0].observe
            assert observe is not None
            known = np.frombuffer(seen, np.bool_).reshape(len(MEASURES), -1) if seen else None
            observe(Observation(np.frombuffer(values, np.float32).reshape(len(MEASURES), -1), known))


class StepSearches(Sequence[IndexSearch]):
    """The searches of a step, whose results are made when they are asked for."""

    def __init__(self, searched: Sequence[tuple[SearchedSpan, Retrieval]], result: _native.StepResult) -> None:
        self._searched = searched
        self._result = result

    def __len__(self) -> int:
        return self._result.searches

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
        offsets, ids, scores, scanned, nbytes, missed, bound, tail, dense, ns = self._result.found(number)
        shape = len(offsets) - 1, 1
        tails = tail.reshape(*shape, -1) if tail.size else None
        flags = dense.view(np.bool_).reshape(shape)
        found = SearchResult(offsets, ids, scores, scanned, nbytes, missed.reshape(shape), bound.reshape(shape), tails, flags)
        return IndexSearch(part, retrieval, found, ns)


def prepared_step(
    query: AttentionQuery, partition: RunPartition, retrieval: Retrieval, *, widened: bool = False, tight: bool = False
) -> PreparedStep:
    """The step of a partition, made when it is first asked for. widened: whether the retrieval replaces those that parts name.
    tight: whether searches spend more time on a smaller bound on what they miss."""
    key = query.options, retrieval, tight
    made: PreparedStep | None = partition.steps.get(key)
    if made is None:
        if len(partition.steps) >= STEPS_MAX:
            partition.steps.clear()
        made = partition.steps[key] = _prepare(query, partition, retrieval, widened, tight)
    return made


def made_step(partition: RunPartition, options: QueryOptions, retrieval: Retrieval) -> PreparedStep | None:
    """The step of a partition, if it was made for these options and answers by itself."""
    if options.max_missed_mass is not None and partition.widens:
        return None
    made: PreparedStep | None = partition.steps.get((options, retrieval, False))
    return made


def _prepare(query: AttentionQuery, partition: RunPartition, retrieval: Retrieval, widened: bool, tight: bool) -> PreparedStep:
    layout, run, limit = query.layout, query.run, query.options.max_missed_mass
    asked = [retrieval if widened or part.retrieval is None else part.retrieval for part in partition.searched]
    searched = [(part, _shared(own, partition)) for part, own in zip(partition.searched, asked, strict=True)]
    apart = partition.sinks and query.ignores_sinks
    window, grows_from = (partition.fixed_window_behind_sinks if apart else partition.fixed_window)(run)
    native = _native.Step(
        layout.native,
        query.q.shape[0],
        query.scale,
        tuple(window),
        grows_from,
        tuple(partition.sink_blocks(run)) if apart else None,
        [_search(query, partition, part, own, tight) for part, own in searched],
        [(tuple(partition.blocks(run, part.span)), part.span.tokens, part.heads) for part in partition.whole],
        partition.tokens,
        partition.guards,
        None if partition.device is not None else partition.ranges,
        FOUND_SHARE_MAX,
        WHOLE_SHARE_MAX,
        inf if limit is None else limit,
    )
    return PreparedStep(native, searched)


def _search(
    query: AttentionQuery, partition: RunPartition, part: SearchedSpan, retrieval: Retrieval, tight: bool
) -> tuple[object, ...]:
    """One part as `_native.Step` takes it."""
    tail = part.index.estimates_tail and (part.estimate_tail or query.options.estimate_tail)
    searcher = searcher_of(part.index, retrieval, query.scale, estimate_tail=tail, tight=tight)
    blocks = tuple(partition.blocks(query.run, part.span))
    turn = None if part.turn is None else (part.turn.cos, part.turn.sin, part.turn.interleaved)
    cut = None if query.options.estimate_tail else _cut(retrieval, query.scale)
    asked = part.active_heads, part.hidden, part.observe is not None, turn, cut
    return searcher, part.span.begin, part.span.end, blocks, *asked


def _cut(retrieval: Retrieval, scale: float) -> tuple[_native.StepCut, float] | None:
    """Which of the tokens found count once all searches were made; None for all."""
    match retrieval:
        case Dipr():
            return _native.StepCut.range, retrieval.beta(scale)
        case TopK(k):
            return _native.StepCut.top_k, float(k)
    return None


def _shared(retrieval: Retrieval, partition: RunPartition) -> Retrieval:
    """The retrieval for one of several parts, chosen so that all of them together find what the query needs."""
    if isinstance(retrieval, TopK):
        return TopK(min(retrieval.k, partition.tokens))  # the caller may ask for any number
    if isinstance(retrieval, TopP) and len(partition.searched) > 1:
        return TopP(1 - (1 - retrieval.p) / len(partition.searched))  # each part may miss an equal share of what all may miss
    return retrieval
