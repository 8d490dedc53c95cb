"""Attention on two devices at the same time: the CPU answers its parts, another device the others, and both states merge.

Bounds on the missed mass compose: if neither device misses more than a share of its own mass, both together miss no more than
that share of the whole. So each device reads on by itself.
"""

from dataclasses import replace
from time import perf_counter_ns

import numpy as np

from indexes.base import Float32
from indexes.retrieval import Exact, Retrieval
from indexes.widen import widened
from kvdb.attention.device import Answer, DeviceAttention, Pending
from kvdb.attention.exact import AttentionStats
from kvdb.attention.partition import RunPartition
from kvdb.attention.query import AttentionQuery
from kvdb.attention.signs import signs_of, unlike_heads
from kvdb.attention.sparse import exact, sparse
from kvdb.attention.state import AttentionState, merge


def hybrid_attention(
    query: AttentionQuery,
    partition: RunPartition,
    device: DeviceAttention,
    retrieval: Retrieval,
    pending: Pending | None = None,
) -> tuple[AttentionState, AttentionStats]:
    """Attention over the whole run. device: answers the spans that the CPU leaves out. pending: the device's answer, if it was
    launched already.

    Both devices start at once, so neither knows the other's largest score. Each retrieves by its own largest score, which finds
    at least as much as the largest score of all would. Raises DeviceFailed.
    """
    started = perf_counter_ns()
    pending = pending or device.launch(query.q, None)
    answered = sparse(query, partition, retrieval) if query.searches(partition) else exact(query, partition)
    here, stats = answered
    answer = pending.result()
    limit = query.options.max_missed_mass
    if limit is not None:
        answer = _read_on(device, query, retrieval, answer, limit)
    elif partition.guards is not None and not _guarded(answer, partition.guards):
        answer = device.launch(query.q, Exact()).result()
    state = merge([here, answer.state])
    signs = signs_of(query.q, state.lse, answer.missed_bound, np.full_like(state.lse, np.nan))
    unlike = unlike_heads(signs, partition.ranges if query.judged else None, query.layout.kv_heads)
    if unlike is not None:
        here, stats = exact(query, partition)
        answer = device.launch(query.q, Exact()).result()
        state = merge([here, answer.state])
    out = state.out.astype(query.q.dtype, copy=False)
    joined = _joined(stats, here.lse, answer, state.lse)
    kernel_ns = perf_counter_ns() - started
    return AttentionState(out, state.lse), replace(joined, signs=signs, unlike=unlike, kernel_ns=kernel_ns)


def _read_on(device: DeviceAttention, query: AttentionQuery, retrieval: Retrieval, answer: Answer, limit: float) -> Answer:
    """The device's first answer that is proven to miss no more than `limit` of its own mass."""
    for attempt, _ in widened(retrieval, query.run.tokens):
        if _shares(answer.missed_bound, answer.state.lse).max(initial=0.0) <= limit:
            break
        answer = device.launch(query.q, attempt).result()
    return answer


def _guarded(answer: Answer, guards: Float32) -> bool:
    """Whether no query is estimated to miss more of the device's mass than the guards allow, float32 `[kv_heads]`."""
    missed = (answer.missed - answer.state.lse).reshape(len(guards), -1)
    return bool((missed <= guards[:, None]).all())


def _joined(stats: AttentionStats, here: Float32, answer: Answer, lse: Float32) -> AttentionStats:
    """The joined statistics of both devices. The sum of their bounds bounds the whole, because the share of the whole mass that a
    device missed is at most the share of its own mass."""
    missed, bound = (_shares(log, answer.state.lse) for log in (answer.missed, answer.missed_bound))
    weight = np.exp(np.where(np.isfinite(here), here - lse, -np.inf))
    mine = stats.missed * float(weight.mean()) + float((missed * (1 - weight)).mean())
    bound_max = max(stats.missed_bound_max, float(bound.max(initial=0.0)))
    return replace(
        stats,
        scanned=stats.scanned + answer.scanned,
        retrieved=stats.retrieved + answer.retrieved,
        nbytes=stats.nbytes + answer.nbytes,
        missed=mine,
        missed_bound=min(bound_max, stats.missed_bound + float(bound.mean())),
        missed_bound_max=bound_max,
        lse=lse,
        missed_log=answer.missed if stats.missed_log is None else np.logaddexp(stats.missed_log, answer.missed),
    )


def _shares(log: Float32, lse: Float32) -> Float32:
    """The shares of one device's mass that it missed, from the logarithms of the missed sum and of the sum that was read."""
    finite = np.isfinite(log)
    missed = np.where(finite, log, -np.inf).astype(np.float64)
    shares = np.exp(np.where(finite, missed - np.where(finite, np.logaddexp(missed, lse), 0), -np.inf))
    return np.where(np.isposinf(log) | np.isnan(log), 1.0, shares).astype(np.float32)
