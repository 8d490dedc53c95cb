"""Carrying out a plan: every access path answers with a state, and what it took is counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

import kvdb._native as _native
from indexes.base import Float32, Found
from indexes.retrieval import Retrieval
from kvdb.attention.run import Reads, Run
from kvdb.attention.sections import Searched
from kvdb.attention.state import AttentionState
from kvdb.storage.block import BlockLayout, bits
from kvdb.types import Array


@dataclass(frozen=True)
class Whole:
    """The state over blocks that are read whole; top: float32 `[q_heads, n]`, the largest q.k, -inf for none."""

    state: AttentionState
    top: Array


@dataclass(frozen=True)
class Search:
    """One index that was asked: what it was asked for, what it found, and how long it took."""

    part: Searched
    retrieval: Retrieval
    found: Found
    ns: int


@dataclass(frozen=True)
class Reading:
    """What one call took. Tokens count once for the group of query heads that shared the read.

    scanned: tokens looked at in whatever form. retrieved: tokens attended, the mean over the queries. nbytes: read. kernel_ns:
    spent below Python or waiting for it. missed, missed_bound: the share of the softmax mass that was left out, an estimate and
    what it cannot exceed, both means over the queries; missed_bound_max: the largest bound. searches: those that led to the
    answer. window, window_ns: what was read whole before them, None where there were none. lse: float32 `[q_heads, n]`, of what
    was read, without estimates.
    """

    scanned: float
    retrieved: float
    nbytes: int
    kernel_ns: int
    missed: float = 0.0
    missed_bound: float = 0.0
    missed_bound_max: float = 0.0
    searches: tuple[Search, ...] = ()
    window: Whole | None = None
    window_ns: int = 0
    lse: Float32 | None = None


def exact(
    layout: BlockLayout, run: Run, q: Array, new: int, scale: float, top: Array | None = None
) -> tuple[AttentionState, Reading]:
    """Attention over every token of a run, by the native kernel: one launch for all parts that lie in main memory.

    q: `[q_heads, n, head_dim]` in the layout's dtype. new: 0 when every query sees the whole run, or n when the queries are
    those of its last n tokens and attend causally. top: float32 `[q_heads, n]`, where given takes the largest q.k. Returns the
    state, its output in q's dtype.
    """
    state, spent = _attended(layout, run.whole, q, new, scale, top)
    return state, Reading(run.tokens, run.tokens, run.read_tokens * layout.token_nbytes, spent)


def exact_over(
    layout: BlockLayout, reads: Reads, q: Array, new: int, scale: float, top: Array | None = None
) -> tuple[AttentionState, Reading]:
    """`exact` over chosen blocks of a run."""
    state, spent = _attended(layout, reads, q, new, scale, top)
    tokens = int(reads.counts.sum())
    return state, Reading(tokens, tokens, tokens * layout.token_nbytes, spent)


def _attended(
    layout: BlockLayout, reads: Reads, q: Array, new: int, scale: float, top: Array | None
) -> tuple[AttentionState, int]:
    """The state, its output in q's dtype, and the nanoseconds it took."""
    out = np.empty(q.shape, q.dtype)
    lse = np.empty(q.shape[:2], np.float32)
    started = perf_counter_ns()
    addresses, counts, placement = reads
    _native.attend(layout.native, bits(q), addresses, counts, new, scale, bits(out), lse, top, placement=placement)
    return AttentionState(out, lse), perf_counter_ns() - started


def whole(layout: BlockLayout, reads: Reads, q: Array, new: int, scale: float) -> Whole:
    """`exact` over chosen blocks of a run, in float32, ready to be merged."""
    out = np.empty(q.shape, np.float32)
    lse, top = np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
    addresses, counts, placement = reads
    _native.attend(layout.native, bits(q), addresses, counts, new, scale, out, lse, top, placement=placement)
    return Whole(AttentionState(out, lse), top)


def attend_heads(  # noqa: PLR0913, PLR0917  # the kernel's
    layout: BlockLayout,
    reads: Reads,
    q: Array,
    scale: float,
    kv_heads: Sequence[int],
    out: Float32,
    lse: Float32,
    top: Float32 | None = None,
) -> None:
    """Attention of some KV heads, ascending, over chosen blocks that every query sees; the rows of others are left as they are.

    out: float32 as q, lse: float32 `[q_heads, n]`. top: the same, where given takes the largest q.k.
    """
    addresses, counts, placement = reads
    begin = 0
    for i, head in enumerate(kv_heads):
        if i + 1 == len(kv_heads) or kv_heads[i + 1] != head + 1:
            run = kv_heads[begin], head + 1
            _native.attend(layout.native, bits(q), addresses, counts, 0, scale, out, lse, top, *run, placement=placement)
            begin = i + 1
