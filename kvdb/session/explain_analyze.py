"""EXPLAIN ANALYZE carries a plan out, measures each of its nodes, and compares the result with exact attention."""

from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

import numpy as np

import kvdb.attention.exact as exact_attention
from indexes.base import Float32
from kvdb.attention.device import DeviceAttention, DeviceFailed
from kvdb.attention.exact import AttentionStats, IndexSearch
from kvdb.attention.state import AttentionState
from kvdb.errors import InvalidArgument, PositionError
from kvdb.planning.prepared import Prepared
from kvdb.session.layer import Layer
from kvdb.storage.paged_segment import pinned
from kvdb.types import Array, LayerShape
from query_optimizer.access import Access, Actual
from query_optimizer.plan import Outcome, Plan
from query_optimizer.query_options import QueryOptions


def analyze_plan(layer: Layer, shape: LayerShape, options: QueryOptions) -> Plan:
    """The plan of the layer's last query with its measured costs. Raises InvalidArgument where there was no query, and
    PositionError for a layer without tokens.

    Nodes that are read whole are read once more, each by itself, to be measured; usually one launch reads them all. The total is
    measured on the plan as it is usually carried out.
    """
    q = layer.query_samples.last
    if q is None:
        raise InvalidArgument(f"layer {layer.number} has seen no query to analyze; ask one, or explain without analyze")
    if not layer.run.tokens:
        raise PositionError(
            f"layer {layer.number} holds no tokens that its last query could be analyzed over; expected at least one: update it "
            "first, or explain without analyze"
        )
    with pinned(layer.pages):  # reading from disk is not what is measured
        return _analyzed(layer, shape, options, q)


def _analyzed(layer: Layer, shape: LayerShape, options: QueryOptions, q: Array) -> Plan:
    started = perf_counter()
    prepared = layer.planner.prepare_once(1, options)
    planning = perf_counter() - started
    if prepared.partition.device is not None:
        layer.execute(prepared, q, options)  # the first time makes its tables on the device
    started = perf_counter()
    state, stats = layer.execute(prepared, q, options)
    seconds = perf_counter() - started
    asked = layer.tail.layout, layer.run, q, 1, shape.softmax_scale
    exact, _ = exact_attention.exact(*asked, sinks=layer.sinks, window=shape.window)
    searches = iter(stats.searches)
    accesses = tuple(_measured(layer, shape, prepared, access, searches, q) for access in prepared.plan.accesses)
    return replace(
        prepared.plan,
        accesses=accesses,
        actual=Actual(stats.retrieved, stats.scanned, stats.nbytes, seconds),
        outcome=_outcome(state, exact, stats, planning),
    )


def _measured(
    layer: Layer, shape: LayerShape, prepared: Prepared, access: Access, searches: Iterator[IndexSearch], q: Array
) -> Access:
    if prepared.parts[access.part].slots is not None:
        return replace(access, actual=_of_gpu(layer.planner.device_attention_of(prepared, access), q))
    if access.index is not None:
        search = next(searches, None)  # there is none where one before it gave up on everything
        if search is None:
            return access
        return replace(access, actual=_of_search(access, shape, search, _value_nbytes(layer, prepared, access)))
    reads = layer.run.part(slice(*layer.planner.blocks_of(prepared, access)))
    heads = access.heads
    out, lse = np.empty((*q.shape[:2], shape.value_dim), np.float32), np.empty(q.shape[:2], np.float32)
    started = perf_counter()
    exact_attention.attend_heads(layer.tail.layout, reads, q, shape.softmax_scale, heads, out, lse)
    seconds = perf_counter() - started
    nbytes = layer.tail.layout.nbytes_of(reads.addresses, reads.counts) * len(heads) // shape.kv_heads
    return replace(access, actual=Actual(access.tokens, access.tokens, nbytes, seconds))


def _of_gpu(device: DeviceAttention, q: Array) -> Actual | None:
    """The cost of one access on the GPU; None where the GPU fails. The second run is measured, because the first one allocates
    memory on the device."""
    try:
        device.launch(q, None).result()
        started = perf_counter()
        answer = device.launch(q, None).result()
    except DeviceFailed:
        return None
    return Actual(answer.retrieved, answer.scanned, answer.nbytes, perf_counter() - started)


def _value_nbytes(layer: Layer, prepared: Prepared, access: Access) -> int:
    """The bytes of one token's values where it is read."""
    segment = prepared.parts[access.part].segment
    return (layer.tail.layout if segment is None else segment.tables[layer.number].layout).value_nbytes


def _of_search(access: Access, shape: LayerShape, search: IndexSearch, value_nbytes: int) -> Actual:
    """The cost of a search. value_nbytes: the bytes of one token's values where it searched."""
    result, group = search.result, shape.q_heads // shape.kv_heads
    dense = np.zeros(1, np.bool_) if result.dense is None else result.dense.reshape(shape.kv_heads, -1)
    left = np.broadcast_to(np.asarray(dense.any(axis=-1), np.bool_), shape.kv_heads)
    by_head = np.diff(result.offsets).reshape(shape.kv_heads, -1).sum(axis=1)
    attended = int(by_head[~left].sum())  # what was found for a head is not used if the head is read whole
    left_heads = int(np.count_nonzero(left))
    return Actual(
        tokens=attended / (max(len(access.heads) - left_heads, 1) * group),
        scanned=result.scanned / len(access.heads),
        nbytes=result.nbytes + attended * value_nbytes // shape.kv_heads,
        seconds=search.ns / 1e9,
        left_heads=left_heads,
    )


def _outcome(state: AttentionState, exact: AttentionState, stats: AttentionStats, planning: float) -> Outcome:
    read: Float32 = exact.lse if stats.lse is None else stats.lse
    out, right = state.out.astype(np.float64), exact.out.astype(np.float64)
    length = np.linalg.norm(right, axis=-1)
    error = np.linalg.norm(out - right, axis=-1) / np.where(length > 0, length, 1)
    return Outcome(
        missed=stats.missed,
        missed_bound=stats.missed_bound_max,
        missed_true=float(np.maximum(0, 1 - np.exp(read.astype(np.float64) - exact.lse)).mean()),
        output_error=float(error.mean()),
        planning_seconds=planning,
    )
