"""Exact attention of one token each of several sessions: what they share is read once, and the states are merged."""

from collections.abc import Sequence
from time import perf_counter_ns

import numpy as np

import kvdb._native as _native
from kvdb.attention.execute import Reading
from kvdb.attention.run import Reads, Run
from kvdb.attention.sharing import Sharing
from kvdb.attention.state import AttentionState
from kvdb.storage.block import BlockLayout, bits
from kvdb.types import Array, Float32


def exact_together(
    layout: BlockLayout, runs: Sequence[Run], sharing: Sharing, q: Array, scale: float
) -> tuple[Array, list[Reading]]:
    """Attention of one query of each session over all of its run.

    q: `[sessions, q_heads, head_dim]` in the layout's dtype; the result: float32 of the same shape. runs: of each session,
    without overlays. sharing: among the views of the runs. A reading counts the tokens that its session attended, and its part of
    the bytes and the time of what was shared.
    """
    rows = bits(q).swapaxes(0, 1)
    out, lse = np.empty(q.shape, np.float32).swapaxes(0, 1), np.empty((*q.shape[:2], 1), np.float32)
    nbytes, ns = np.zeros(len(runs), np.int64), np.zeros(len(runs), np.int64)
    for i, run in enumerate(runs):
        views = [run.views[view] for view in sharing.alone[i]] if sharing.alone[i] else []
        reads = run.part(*views, slice(run.base_blocks, run.blocks))
        ns[i] = _attend(layout, reads, rows[:, i : i + 1], scale, out[:, i : i + 1], lse[i])
        nbytes[i] = _nbytes(layout, reads)
    state = AttentionState(out, np.ascontiguousarray(lse[:, :, 0].T))
    for group in sharing.groups:
        members, first = list(group.members), runs[group.members[0]]
        reads = first.part(*(first.views[view] for view in group.views))
        shape = len(rows), len(members)
        shared = AttentionState(np.empty((*shape, q.shape[2]), np.float32), np.empty(shape, np.float32))
        ns[members] += _attend(layout, reads, np.take(rows, members, axis=1), scale, shared.out, shared.lse) // len(members)
        nbytes[members] += _nbytes(layout, reads) // len(members)
        _merge(layout, state, members, shared)
    readings = [Reading(run.tokens, run.tokens, int(nbytes[i]), int(ns[i])) for i, run in enumerate(runs)]
    return state.out.swapaxes(0, 1), readings


def _attend(layout: BlockLayout, reads: Reads, q: Array, scale: float, out: Float32, lse: Float32) -> int:
    """The state of queries, as the kernels take them, that see all of these blocks; the nanoseconds that it took."""
    started = perf_counter_ns()
    addresses, counts, placement = reads
    _native.attend(layout.native, q, addresses, counts, 0, scale, out, lse, placement=placement)
    return perf_counter_ns() - started


def _merge(layout: BlockLayout, state: AttentionState, members: list[int], shared: AttentionState) -> None:
    """Merges a group's state into the rows of its members."""
    out, lse = (np.take(array, members, axis=1) for array in (state.out, state.lse))
    _native.merge_tail(layout.native, out, lse, shared.out, shared.lse, out, lse)
    state.out[:, members], state.lse[:, members] = out, lse


def _nbytes(layout: BlockLayout, reads: Reads) -> int:
    return int(reads.counts.sum()) * layout.token_nbytes
