"""Prefix-shared decoding: views that several sessions have in common are read once."""

from collections.abc import Callable, Hashable, Sequence
from time import perf_counter_ns
from typing import NamedTuple, TypeVar

import numpy as np

import kvdb._native as _native
from kvdb.attention.block_run import BlockReads, BlockRun
from kvdb.attention.exact import AttentionStats
from kvdb.attention.state import AttentionState, check_finite
from kvdb.storage.block_layout import BlockLayout
from kvdb.types import Array, Float32, bits

View = TypeVar("View", bound=Hashable)
SHARED_TOKENS_MIN = 1024
"""Shorter views are not shared: they stay in the caches, and a merge costs as much as reading them again."""


class Group(NamedTuple):
    """Views that the same sessions read. views: their numbers in the first member. members: the numbers of two or more sessions,
    ascending."""

    views: tuple[int, ...]
    members: tuple[int, ...]


class Sharing(NamedTuple):
    """The groups, whose views are read once, and the numbers of the views that each session reads alone."""

    groups: list[Group]
    alone: list[list[int]]


def sharing_of(sessions: Sequence[Sequence[View]], worth: Callable[[View], bool]) -> Sharing:
    """Which sessions share which views. sessions: the views of each session, each once; equal views hold the same keys and values
    for the same query. worth: tells whether sharing a view pays."""
    readers: dict[View, list[int]] = {}
    for session, views in enumerate(sessions):
        for view in views:
            readers.setdefault(view, []).append(session)
    once = {view: tuple(members) for view, members in readers.items() if len(members) > 1 and worth(view)}
    shared: dict[tuple[int, ...], list[View]] = {}
    for view, members in once.items():
        shared.setdefault(members, []).append(view)
    groups = [Group(tuple(map(sessions[members[0]].index, views)), members) for members, views in shared.items()]
    alone = [[number for number, view in enumerate(views) if view not in once] for views in sessions]
    return Sharing(groups, alone)


def exact_together(
    layout: BlockLayout, runs: Sequence[BlockRun], sharing: Sharing, q: Array, scale: float
) -> tuple[Array, list[AttentionStats]]:
    """Attention of one query of each session over all of its run.

    q: `[sessions, q_heads, head_dim]` in the layout's dtype; the result: float32 `[sessions, q_heads, value_dim]`. runs: the run
    of each session, without overlays. sharing: how the sessions share the views of the runs. The statistics of a session count
    the tokens that it attended, and its part of the bytes and time of shared reads. Raises NonFiniteError where float32 cannot
    hold an answer.
    """
    rows = bits(q).swapaxes(0, 1)
    out = np.empty((*q.shape[:2], layout.value_dim), np.float32).swapaxes(0, 1)
    lse = np.empty((*q.shape[:2], 1), np.float32)
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
        shared = AttentionState(np.empty((*shape, layout.value_dim), np.float32), np.empty(shape, np.float32))
        ns[members] += _attend(layout, reads, np.take(rows, members, axis=1), scale, shared.out, shared.lse) // len(members)
        nbytes[members] += _nbytes(layout, reads) // len(members)
        check_finite(shared.lse, bool(np.isfinite(shared.out).all()))
        _merge(layout, state, members, shared)
    stats = [AttentionStats(run.tokens, run.tokens, int(nbytes[i]), int(ns[i])) for i, run in enumerate(runs)]
    check_finite(state.lse, bool(np.isfinite(state.out).all()))
    return state.out.swapaxes(0, 1), stats


def _attend(layout: BlockLayout, reads: BlockReads, q: Array, scale: float, out: Float32, lse: Float32) -> int:
    """Attend to all of these blocks and write the state to out and lse. Returns the nanoseconds that it took."""
    started = perf_counter_ns()
    addresses, counts, placement = reads
    _native.attend(layout.native, q, addresses, counts, 0, scale, out, lse, placement=placement)
    return perf_counter_ns() - started


def _merge(layout: BlockLayout, state: AttentionState, members: list[int], shared: AttentionState) -> None:
    """Merge a group's state into the rows of its members."""
    out, lse = (np.take(array, members, axis=1) for array in (state.out, state.lse))
    _native.merge_tail(layout.native, out, lse, shared.out, shared.lse, out, lse)
    state.out[:, members], state.lse[:, members] = out, lse


def _nbytes(layout: BlockLayout, reads: BlockReads) -> int:
    return layout.nbytes_of(reads.addresses, reads.counts)
