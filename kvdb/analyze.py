"""EXPLAIN ANALYZE: a plan is carried out, each of its nodes is measured, and the result is compared with exact attention."""

from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

import numpy as np

from indexes.base import Float32
from kvdb.attention import execute
from kvdb.attention.away import Away, AwayFailed
from kvdb.attention.execute import Reading, Search
from kvdb.attention.state import AttentionState
from kvdb.layer import Layer
from kvdb.planner import Prepared
from kvdb.types import Array, ModelSpec
from query_optimizer.access import Access, Actual
from query_optimizer.plan import Outcome, Plan
from query_optimizer.wanted import Wanted


def analyze(layer: Layer, spec: ModelSpec, wanted: Wanted, q: Array) -> Plan:
    """The plan of a query of the last token, `[q_heads, 1, head_dim]`, with what carrying it out took.

    Nodes that are read whole are read by themselves to be measured, where one launch reads them together otherwise; the whole is
    measured as it is.
    """
    started = perf_counter()
    prepared = layer.planner.fresh(1, wanted)
    planning = perf_counter() - started
    if prepared.sections.away is not None:
        layer.carry_out(prepared, q, wanted)  # the first makes its tables on the device
    started = perf_counter()
    state, reading = layer.carry_out(prepared, q, wanted)
    seconds = perf_counter() - started
    exact, _ = execute.exact(layer.tail.layout, layer.run, q, 1, spec.softmax_scale)
    searches = iter(reading.searches)
    accesses = tuple(_measured(layer, spec, prepared, access, searches, q) for access in prepared.plan.accesses)
    return replace(
        prepared.plan,
        accesses=accesses,
        actual=Actual(reading.retrieved, reading.scanned, reading.nbytes, seconds),
        outcome=_outcome(state, exact, reading, planning),
    )


def _measured(layer: Layer, spec: ModelSpec, prepared: Prepared, access: Access, searches: Iterator[Search], q: Array) -> Access:
    if prepared.parts[access.part].slots is not None:
        return replace(access, actual=_of_gpu(layer.planner.away_of(prepared, access), q))
    if access.index is not None:
        search = next(searches, None)  # none, where one before it gave up on everything
        return access if search is None else replace(access, actual=_of_search(access, spec, search))
    reads = layer.run.part(slice(*layer.planner.blocks_of(prepared, access)))
    heads = access.heads
    out, lse = np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32)
    started = perf_counter()
    execute.attend_heads(layer.tail.layout, reads, q, spec.softmax_scale, heads, out, lse)
    seconds = perf_counter() - started
    nbytes = access.tokens * spec.token_nbytes * len(heads) // spec.kv_heads
    return replace(access, actual=Actual(access.tokens, access.tokens, nbytes, seconds))


def _of_gpu(away: Away, q: Array) -> Actual | None:
    """Of one way alone, the second time: the first makes what it needs on the device. None where it brings no answer."""
    try:
        away.launch(q, None).result()
        started = perf_counter()
        answer = away.launch(q, None).result()
    except AwayFailed:
        return None
    return Actual(answer.retrieved, answer.scanned, answer.nbytes, perf_counter() - started)


def _of_search(access: Access, spec: ModelSpec, search: Search) -> Actual:
    found, group = search.found, spec.q_heads // spec.kv_heads
    dense = np.zeros(1, np.bool_) if found.dense is None else found.dense.reshape(spec.kv_heads, -1)
    left = np.broadcast_to(np.asarray(dense.any(axis=-1), np.bool_), spec.kv_heads)
    by_head = np.diff(found.offsets).reshape(spec.kv_heads, -1).sum(axis=1)
    attended = int(by_head[~left].sum())  # of a head that is read whole, what was found is not used
    left_heads = int(np.count_nonzero(left))
    return Actual(
        tokens=attended / (max(len(access.heads) - left_heads, 1) * group),
        scanned=found.scanned / len(access.heads),
        nbytes=found.nbytes + attended * spec.token_nbytes // (2 * spec.kv_heads),
        seconds=search.ns / 1e9,
        left_heads=left_heads,
    )


def _outcome(state: AttentionState, exact: AttentionState, reading: Reading, planning: float) -> Outcome:
    read: Float32 = exact.lse if reading.lse is None else reading.lse
    out, right = state.out.astype(np.float64), exact.out.astype(np.float64)
    length = np.linalg.norm(right, axis=-1)
    error = np.linalg.norm(out - right, axis=-1) / np.where(length > 0, length, 1)
    return Outcome(
        missed=reading.missed,
        missed_bound=reading.missed_bound_max,
        missed_true=float(np.maximum(0, 1 - np.exp(read.astype(np.float64) - exact.lse)).mean()),
        output_error=float(error.mean()),
        planning_seconds=planning,
    )
