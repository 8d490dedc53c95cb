"""Attention over the tokens that queries need: some blocks are read whole, the rest is searched.

The window and whatever has no index are one part; every index that is searched is another. The parts are answered one after
the other, so that each search starts from the largest score and the mass that those before it have seen (`kvdb.attention.step`).
Here searches are widened until they prove what the caller wants, and what they give up is read whole.
"""

from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter_ns

import numpy as np

import kvdb.attention.exact as exact_attention
from indexes.retrieval import Exact, Retrieval
from indexes.widen import widened
from kvdb._native import StepEnd
from kvdb.attention.exact import AttentionStats
from kvdb.attention.partition import RunPartition
from kvdb.attention.query import AttentionQuery
from kvdb.attention.signs import SIGNS
from kvdb.attention.state import AttentionState, beyond_float32
from kvdb.attention.step import PreparedStep, StepAnswers, prepared_step
from kvdb.types import Array, Float32


def sparse(query: AttentionQuery, partition: RunPartition, retrieval: Retrieval) -> tuple[AttentionState, AttentionStats]:
    """Attention over what `retrieval` asks for, widened until the bound that the query wants holds.

    retrieval: for the searched parts that name none of their own. KV heads that are estimated to miss more than the partition's
    guards allow, or of which a sign is outside of its range, are read whole. Raises NonFiniteError.
    """
    started, answers = perf_counter_ns(), SparseAnswers(query)
    causal, limited = bool(partition.causal(query.q.shape[1])), query.options.max_missed_mass is not None
    for number, (attempt, tight) in enumerate(_attempts(partition, retrieval, limited)):
        step = prepared_step(query, partition, attempt, widened=limited, tight=tight)
        left, observed = answers.left, query.observed and not number
        given = step.run(query, left, causal=causal, observed=observed)
        answers.take(left, given)
        if observed and given.results[0].end != StepEnd.reads_everything:
            step.observe(given.results[0], None, np.logaddexp(given.logs[0, 1], given.logs[0, 2])[:, None])
        elif observed:
            answers.unshown = step, given
        if not answers.left:
            break
        partition.widens = True  # the next queries are likely to need more than one search too
    state, stats = answers.finished(partition)
    return state, replace(stats, kernel_ns=perf_counter_ns() - started)


def exact(query: AttentionQuery, partition: RunPartition, top: Array | None = None) -> tuple[AttentionState, AttentionStats]:
    """Attention over everything that the CPU answers. top: as `exact_attention.exact` takes it."""
    layout, run, q = query.layout, query.run, query.q
    if partition.device is None:
        return exact_attention.exact(layout, run, q, q.shape[1], query.scale, top, sinks=query.sinks, window=query.window)
    assert not query.window
    causal, reads = partition.causal(q.shape[1]), partition.cpu_blocks(run)
    return exact_attention.exact_over(layout, reads, q, causal, query.scale, top, sinks=query.sinks)


def _attempts(partition: RunPartition, retrieval: Retrieval, limited: bool) -> Iterator[tuple[Retrieval, bool]]:
    """What is searched for, one after the other, and whether bounds are to be tight. limited: whether a bound has to hold."""
    for attempt, tight in widened(retrieval, partition.tokens):
        if isinstance(attempt, Exact):
            return
        yield attempt, tight
        if not limited:
            return


class SparseAnswers:
    """The answers to the queries of a call, as they come. left: the numbers of those that have none yet. unshown: what an
    observed query showed, where all has to be read until it is known."""

    def __init__(self, query: AttentionQuery) -> None:
        heads, n, _ = query.q.shape
        self._query = query
        self.left = list(range(n))
        self.unshown: tuple[PreparedStep, StepAnswers] | None = None
        self._out = np.empty((heads, n, query.layout.value_dim), query.q.dtype)
        self._lse, self._read = np.empty((heads, n), np.float32), np.empty((heads, n), np.float32)
        self._missed = np.full((heads, n), -np.inf, np.float32)
        self._signs = np.full((SIGNS, heads, n), np.nan, np.float32)
        self._given_up = np.ones((heads, n), np.bool_)
        self._unlike = np.zeros(query.layout.kv_heads, np.bool_)
        self._whole: list[int] = []
        self._stats = AttentionStats(0, 0, 0, 0)

    def take(self, queries: list[int], given: StepAnswers) -> None:
        """Take the answers to some queries. Raises NonFiniteError."""
        self.left, n, stats = [], self._query.q.shape[1], self._stats
        for i, (number, result) in enumerate(zip(queries, given.results, strict=True)):
            if result.end == StepEnd.not_finite:
                raise beyond_float32()
            if len(unlike := result.unlike()):
                self._unlike |= unlike.view(np.bool_)
            spent = {"nbytes": result.nbytes, "search_ns": result.search_ns, "gather_ns": result.gather_ns}
            stats = replace(stats, **{name: getattr(stats, name) + more for name, more in spent.items()})
            if result.end == StepEnd.reads_everything:
                self._whole.append(number)
                continue
            stats = replace(stats, scanned=stats.scanned + result.scanned)
            if result.end == StepEnd.bound_exceeded:
                self.left.append(number)
                continue
            self._out[:, number] = given.out[i]
            self._lse[:, number], self._read[:, number], self._missed[:, number] = given.logs[i]
            self._signs[:, :, number] = result.signs().reshape(SIGNS, -1)
            self._given_up[:, number] = result.given_up().view(np.bool_) if result.searches else False
            stats = replace(
                stats,
                retrieved=stats.retrieved + result.retrieved / n,
                missed=stats.missed + result.missed / n,
                missed_bound=stats.missed_bound + result.bound / n,
                missed_bound_max=max(stats.missed_bound_max, result.bound_max),
            )
        self._stats = replace(stats, searches=given.searches[0] if n == 1 else ())

    def finished(self, partition: RunPartition) -> tuple[AttentionState, AttentionStats]:
        """All answers, and what they took; those that are left, or gave up, are read whole. Raises NonFiniteError."""
        whole, n = [*self._whole, *self.left], self._query.q.shape[1]
        stats = replace(self._stats, unlike=self._unlike if self._unlike.any() else None, given_up=self._given_up)
        if whole:
            top = None if self.unshown is None else np.empty(self._lse.shape, np.float32)
            state, read = exact(self._query, partition, top)
            self._out[:, whole], self._lse[:, whole] = state.out[:, whole], state.lse[:, whole]
            self._read[:, whole] = state.lse[:, whole]
            self._show(top, state.lse)
            stats = replace(
                stats,
                scanned=read.scanned if len(whole) == n else stats.scanned + read.scanned,
                retrieved=stats.retrieved + read.retrieved * len(whole) / n,
                nbytes=stats.nbytes + read.nbytes,
            )
        if len(whole) < n:
            stats = replace(stats, missed_log=self._missed, signs=self._signs, lse=self._read)
        return AttentionState(self._out, self._lse), stats

    def _show(self, top: Float32 | None, lse: Float32) -> None:
        """Tell what an observed query showed, now that all was read."""
        if self.unshown is not None:
            step, given = self.unshown
            step.observe(given.results[0], top, lse)
