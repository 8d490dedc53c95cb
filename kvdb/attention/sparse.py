"""Attention over the tokens that a query needs: some blocks are read whole, the rest is searched.

The window and whatever has no index are one part; every index that is searched is another. The parts are answered one after
the other, so that each search starts from the largest score and the mass that those before it have seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from time import perf_counter_ns

import numpy as np

import kvdb._native as _native
import kvdb.attention.exact as exact_attention
from indexes.base import Float32, SearchResult
from indexes.retrieval import Exact, Retrieval
from indexes.widen import widened
from kvdb.attention.block_run import BlockReads
from kvdb.attention.exact import AttentionStats, IndexSearch, WindowAttention
from kvdb.attention.merge_found import largest_of
from kvdb.attention.observation import largest, observation
from kvdb.attention.partition import ExactSpan, HeadMask, RunPartition
from kvdb.attention.search import WHOLE_SHARE_MAX, AttentionQuery, give_up, many_given_up, search_parts, split_results
from kvdb.attention.signs import given_up_rows, signs_of, unlike_heads
from kvdb.attention.state import AttentionState, check_finite, merge
from kvdb.attention.step import prepared_step
from kvdb.storage.block_layout import BlockLayout
from kvdb.types import Array, bits


@dataclass(frozen=True)
class SparseAnswer:
    """The state over what was read and found, and what was left out.

    results: of each searched part. whole_share: the share of the searched tokens and KV heads that was read whole, of so many
    bytes (whole_nbytes). missed, bound: the estimated share of the softmax mass that was left out, and what it cannot exceed,
    means over the queries. bound_max: the largest bound. missed_log: float32 `[q_heads, n]`, the logarithm of the estimated sum
    that was left out, -inf for none. signs: see `kvdb.attention.signs`.
    """

    state: AttentionState
    results: list[SearchResult]
    whole_share: float
    whole_nbytes: float
    missed: float
    missed_log: Float32
    bound: float
    bound_max: float
    signs: Float32


class ReadCounters:
    """Tokens looked at and bytes read by the searches of one call. window: the blocks that were read whole before them."""

    def __init__(self, layout: BlockLayout, window: BlockReads) -> None:
        self._layout = layout
        self.window = int(window.counts.sum())
        self.window_nbytes = layout.nbytes_of(window.addresses, window.counts)
        self.scanned: float = self.window
        self.nbytes = 0

    def add(self, searches: Sequence[IndexSearch]) -> None:
        kv_heads = self._layout.kv_heads
        for search in searches:
            result, value_nbytes = search.result, self._layout.of_block(search.part.index.blocks.table[0]).value_nbytes
            self.scanned += result.scanned / kv_heads
            self.nbytes += result.nbytes + len(result.ids) * value_nbytes // kv_heads


def sparse(query: AttentionQuery, partition: RunPartition, retrieval: Retrieval) -> tuple[AttentionState, AttentionStats]:
    """Attention over what `retrieval` asks for, widened until the bound that the query wants holds.

    retrieval: for the searched parts that name none of their own. KV heads that are estimated to miss more than the partition's
    guards allow, or of which a sign is outside of its range, are read whole.
    """
    started = perf_counter_ns()
    step = prepared_step(query, partition, retrieval)
    if step is not None:
        answered, stats = step.answer(query)
        if answered is not None:
            return answered, stats
        if step.exceeded(stats.searches):
            partition.widens = True  # the next queries are likely to need more than one search too
            state, wider = _searched(query, partition, retrieval)
            return state, replace(wider, nbytes=stats.nbytes + wider.nbytes, kernel_ns=perf_counter_ns() - started)
        top = np.empty(query.q.shape[:2], np.float32) if query.observed else None
        state, whole_stats = exact(query, partition, top)
        if top is not None:
            step.observe_whole(stats.searches, top, state.lse)
        spent = perf_counter_ns() - started
        return state, replace(
            whole_stats, nbytes=whole_stats.nbytes + stats.nbytes, kernel_ns=spent, searches=stats.searches, unlike=stats.unlike
        )
    return _searched(query, partition, retrieval)


def _searched(query: AttentionQuery, partition: RunPartition, retrieval: Retrieval) -> tuple[AttentionState, AttentionStats]:
    """`sparse` from Python."""
    started = perf_counter_ns()
    layout, q = query.layout, query.q
    window = _window(query, partition)
    q32 = np.ascontiguousarray(q, dtype=np.float32)
    limit = query.options.max_missed_mass
    read = ReadCounters(layout, partition.window(query.run))
    ranges = partition.ranges if query.judged and partition.device is None else None
    for attempt, tight in widened(retrieval, partition.tokens):
        shown = search_parts(query, partition, q32, window, None if limit is None else attempt, attempt, tight)
        searches = many_given_up(shown, layout.kv_heads, partition.tokens)
        read.add(searches)
        # What a search left is known once everything is read.
        top = window.top.copy() if query.observed and attempt is retrieval and not tight else None
        answer = None if isinstance(attempt, Exact) else _attend(query, partition, window, searches, top)
        unlike = None if answer is None else unlike_heads(answer.signs, ranges, layout.kv_heads)
        if answer is not None and (heads := _unguarded(answer, partition.guards, unlike)) is not None:
            signs = answer.signs
            shown, searches = ([give_up(search, heads) for search in given] for given in (shown, searches))
            top = None if top is None else window.top.copy()
            answer = _attend(query, partition, window, searches, top)
            answer = None if answer is None else replace(answer, signs=signs)
        if answer is None:
            state, stats = exact(query, partition, top)
            if top is not None:
                _observe(query, shown, window, top, state.lse)
            spent = perf_counter_ns() - started
            return state, replace(
                stats, nbytes=stats.nbytes + read.nbytes, kernel_ns=spent, searches=tuple(searches), unlike=unlike
            )
        if top is not None:
            lse = reduce(np.logaddexp, (result.missed for result in answer.results), answer.state.lse)
            _observe(query, shown, window, top, lse)
        if limit is None or answer.bound_max <= limit:
            break
    assert answer is not None
    state = _with_tail(query, answer)
    whole = answer.whole_share * partition.tokens
    stats = AttentionStats(
        scanned=read.scanned + whole,
        retrieved=read.window + sum(len(r.ids) for r in answer.results) / (q.shape[0] * q.shape[1]) + whole,
        nbytes=read.nbytes + read.window_nbytes + round(answer.whole_nbytes),
        kernel_ns=perf_counter_ns() - started,
        missed=answer.missed,
        missed_bound=answer.bound,
        missed_bound_max=answer.bound_max,
        searches=tuple(searches),
        lse=answer.state.lse,
        missed_log=answer.missed_log,
        signs=answer.signs,
        unlike=unlike,
        search_ns=sum(search.ns for search in searches),
    )
    return AttentionState(state.out.astype(q.dtype, copy=False), state.lse), stats


def exact(query: AttentionQuery, partition: RunPartition, top: Array | None = None) -> tuple[AttentionState, AttentionStats]:
    """Attention over everything that the CPU answers. top: as `exact_attention.exact` takes it."""
    layout, run, q = query.layout, query.run, query.q
    if partition.device is None:
        return exact_attention.exact(layout, run, q, q.shape[1], query.scale, top)
    return exact_attention.exact_over(layout, partition.cpu_blocks(run), q, partition.causal(q.shape[1]), query.scale, top)


def _window(query: AttentionQuery, partition: RunPartition) -> WindowAttention:
    """Attention over the blocks that are not searched; the sink tokens apart where a range is to begin behind them. Raises
    NonFiniteError."""
    layout, run, q = query.layout, query.run, query.q
    causal = partition.causal(q.shape[1])
    if not (partition.sinks and query.ignores_sinks):
        window = exact_attention.whole(layout, partition.window(run), q, causal, query.scale)
        _check_scores(window)
        return window
    window = exact_attention.whole(layout, partition.window_behind_sinks(run), q, causal, query.scale)
    sinks = exact_attention.whole(layout, partition.sink_blocks(run), q, 0, query.scale)
    for part in (window, sinks):
        _check_scores(part)
    out, lse = window.state.out, window.state.lse
    _native.merge_tail(layout.native, out, lse, sinks.state.out, sinks.state.lse, out, lse)
    return replace(window, top=np.maximum(window.top, sinks.top))


def _check_scores(window: WindowAttention) -> None:
    """Raises NonFiniteError where float32 could not hold a score. A window may be empty."""
    check_finite(np.maximum(window.state.lse, np.finfo(np.float32).min), out_finite=True)


def _attend(
    query: AttentionQuery,
    partition: RunPartition,
    window: WindowAttention,
    searches: Sequence[IndexSearch],
    top: Float32 | None,
) -> SparseAnswer | None:
    """Attention over the window, what was found, and what is read whole; None where reading everything costs less.

    top: float32 `[q_heads, 1]`, where given becomes the largest q.k that is known, +inf where an index gave up.
    """
    whole, results = split_results(partition, searches, query.layout.kv_heads)
    if top is not None:
        top[:] = largest(results, window.top)
    whole_share = sum(part.span.tokens * float(part.heads.mean()) for part in whole) / max(partition.tokens, 1)
    if whole_share > WHOLE_SHARE_MAX:
        return None
    state = _attend_retrieved(query, partition, window, results, merges=bool(whole))
    for part in whole:
        _read_whole(query, partition, part, state, top)
    missed_log = _summed([result.missed for result in results], state.lse)
    missed, _ = _native.share(missed_log, state.lse)
    bound_log = _summed([result.missed_bound for result in results], state.lse)
    bound, bound_max = _native.share(bound_log, state.lse)
    nbytes = sum(_nbytes(query, partition, part) for part in whole)
    floor = reduce(np.maximum, (largest_of(search.result, window.floor.shape) for search in searches), window.floor)
    signs = signs_of(query.q, state.lse, bound_log, np.float32(query.scale) * floor)
    signs[:, given_up_rows(searches, query.q.shape[:2])] = np.nan
    return SparseAnswer(state, results, whole_share, nbytes, missed, missed_log, bound, bound_max, signs)


def _attend_retrieved(
    query: AttentionQuery, partition: RunPartition, window: WindowAttention, results: Sequence[SearchResult], merges: bool
) -> AttentionState:
    """The state over the window and what was found, float32 as long as something is to be merged with it."""
    state, last = window.state, len(results) - 1
    merges = merges or any(result.tail is not None for result in results)
    # There are fewer results than parts where a search gave up on everything.
    for i, (part, result) in enumerate(zip(partition.searched, results, strict=False)):
        dtype = np.float32 if merges or i < last else query.q.dtype
        to = AttentionState(np.empty(state.out.shape, dtype), np.empty_like(state.lse))
        found = part.index.blocks.table, result.offsets, result.ids, result.scores, query.scale
        _native.attend_retrieved(query.layout.native, *found, state.out, state.lse, bits(to.out), to.lse)
        state = to
    return state


def _nbytes(query: AttentionQuery, partition: RunPartition, part: ExactSpan) -> float:
    """The bytes of a span, of the KV heads that are read."""
    reads = partition.blocks(query.run, part.span)
    return query.layout.nbytes_of(reads.addresses, reads.counts) * float(part.heads.mean())


def _read_whole(
    query: AttentionQuery, partition: RunPartition, part: ExactSpan, state: AttentionState, top: Float32 | None
) -> None:
    """Merge attention over all of a span into the state's rows of some KV heads, and their largest q.k into `top`."""
    reads = partition.blocks(query.run, part.span)
    out, lse = np.empty(state.out.shape, np.float32), np.empty_like(state.lse)
    heads = np.flatnonzero(part.heads).tolist()
    span_top = None if top is None else np.empty_like(lse)
    exact_attention.attend_heads(query.layout, reads, query.q, query.scale, heads, out, lse, span_top)
    rows = np.repeat(part.heads, len(out) // len(part.heads))
    whole = merge([AttentionState(state.out[rows], state.lse[rows]), AttentionState(out[rows], lse[rows])])
    state.out[rows], state.lse[rows] = whole.out, whole.lse
    if top is not None and span_top is not None:
        top[rows] = np.maximum(top[rows], span_top[rows])


def _unguarded(answer: SparseAnswer, guards: Float32 | None, unlike: HeadMask | None) -> HeadMask | None:
    """The KV heads that are unlike, or of which a query is estimated to miss more than its guard allows, bool `[kv_heads]`; None
    for none."""
    if guards is None:
        return unlike
    # Written so that what is no number counts as too much.
    missed = (answer.missed_log - answer.state.lse).reshape(len(guards), -1)
    heads = np.asarray(~(missed <= guards[:, None]).all(axis=1), np.bool_) | (False if unlike is None else unlike)
    return heads if heads.any() else None


def _observe(query: AttentionQuery, searches: Sequence[IndexSearch], window: WindowAttention, top: Float32, lse: Float32) -> None:
    """Tell the parts what the search of them showed. top, lse: over everything, as far as they are known."""
    heads = query.layout.kv_heads
    for search in searches:
        part = search.part
        if part.observe is not None:
            shown = search.result, heads, part.span.tokens, part.active_heads, window.top, lse, query.scale
            part.observe(observation(*shown, top))


def _summed(missed: Sequence[Float32], lse: Float32) -> Float32:
    """The logarithm of the sum of what several parts missed, given as logarithms; float32 as lse."""
    if len(missed) == 1:
        return missed[0]
    if not missed:
        return np.full_like(lse, -np.inf)
    return np.asarray(np.logaddexp.reduce(np.stack(missed).astype(np.float64), axis=0), np.float32)


def _with_tail(query: AttentionQuery, answer: SparseAnswer) -> AttentionState:
    """The state with the estimates of what was not found merged in, where an index makes one.

    Raises NonFiniteError for an estimate that float32 cannot hold.
    """
    state = answer.state
    tails = [(result.tail, result.missed) for result in answer.results if result.tail is not None]
    for i, (out, missed) in enumerate(tails):
        check_finite(np.where(np.isneginf(missed), 0, missed), bool(np.isfinite(out).all()))
        dtype = query.q.dtype if i + 1 == len(tails) else np.float32
        to = AttentionState(np.empty(state.out.shape, dtype), np.empty_like(state.lse))
        _native.merge_tail(query.layout.native, state.out, state.lse, out, missed, bits(to.out), to.lse)
        state = to
    return state
