"""Exact attention of one token each of several sessions: what they share is read once, and the states are merged."""

from collections.abc import Sequence
from time import perf_counter_ns

import numpy as np

import kvdb._native as _native
from kvdb.attention import execute
from kvdb.attention.execute import Reading
from kvdb.attention.run import Reads, Run
from kvdb.attention.sharing import Sharing
from kvdb.attention.state import AttentionState
from kvdb.storage.block import BlockLayout
from kvdb.types import Array


def exact_together(
    layout: BlockLayout, runs: Sequence[Run], sharing: Sharing, q: Array, scale: float
) -> tuple[Array, list[Reading]]:
    """Attention of one query of each session over all of its run.

    q: `[sessions, q_heads, head_dim]` in the layout's dtype; the result: float32 of the same shape. runs: of each session,
    without overlays. sharing: among the views of the runs. A reading counts the tokens that its session attended, and its part of
    the bytes and the time of what was shared.
    """
    rows = q.swapaxes(0, 1)
    state = AttentionState(np.empty(rows.shape, np.float32), np.empty(rows.shape[:2], np.float32))
    nbytes, ns = np.zeros(len(runs), np.int64), np.zeros(len(runs), np.int64)
    for i, run in enumerate(runs):
        reads = run.part(*(run.views[view] for view in sharing.alone[i]), slice(run.base_blocks, run.blocks))
        own, spent = _attend(layout, reads, rows[:, i : i + 1], scale)
        state.out[:, i : i + 1], state.lse[:, i : i + 1] = own.out, own.lse
        nbytes[i] += _nbytes(layout, reads)
        ns[i] += spent
    for group in sharing.groups:
        members = list(group.members)
        first = runs[members[0]]
        reads = first.part(*(first.views[view] for view in group.views))
        shared, spent = _attend(layout, reads, np.take(rows, members, axis=1), scale)
        _merge(layout, state, members, shared)
        nbytes[members] += _nbytes(layout, reads) // len(members)
        ns[members] += spent // len(members)
    readings = [Reading(run.tokens, run.tokens, int(nbytes[i]), int(ns[i])) for i, run in enumerate(runs)]
    return state.out.swapaxes(0, 1), readings


def _attend(layout: BlockLayout, reads: Reads, q: Array, scale: float) -> tuple[AttentionState, int]:
    """The state of queries that see all of these blocks, and the nanoseconds that it took."""
    started = perf_counter_ns()
    state = execute.whole(layout, reads, q, 0, scale).state
    return state, perf_counter_ns() - started


def _merge(layout: BlockLayout, state: AttentionState, members: list[int], shared: AttentionState) -> None:
    """Merges a group's state into the rows of its members."""
    out, lse = (np.take(array, members, axis=1) for array in (state.out, state.lse))
    _native.merge_tail(layout.native, out, lse, shared.out, shared.lse, out, lse)
    state.out[:, members], state.lse[:, members] = out, lse


def _nbytes(layout: BlockLayout, reads: Reads) -> int:
    return int(reads.counts.sum()) * layout.token_nbytes
