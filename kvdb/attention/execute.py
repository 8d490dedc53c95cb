"""Carrying out a plan: every access path answers with a state, and what it took is counted."""

from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

import kvdb._native as _native
from kvdb.attention.run import Counts, Run
from kvdb.attention.state import AttentionState
from kvdb.storage.block import BlockLayout, bits
from kvdb.types import Addresses, Array


@dataclass(frozen=True)
class Reading:
    """What one call took. Tokens count once for the group of query heads that shared the read.

    scanned: tokens looked at in whatever form. retrieved: tokens attended, the mean over the queries. nbytes: read. kernel_ns:
    spent below Python or waiting for it. missed, missed_bound: the share of the softmax mass that was left out, an estimate and
    what it cannot exceed, both means over the queries; missed_bound_max: the largest bound.
    """

    scanned: float
    retrieved: float
    nbytes: int
    kernel_ns: int
    missed: float = 0.0
    missed_bound: float = 0.0
    missed_bound_max: float = 0.0


def exact(
    layout: BlockLayout, run: Run, q: Array, new: int, scale: float, top: Array | None = None
) -> tuple[AttentionState, Reading]:
    """Attention over every token of a run, by the native kernel: one launch for all parts that lie in main memory.

    q: `[q_heads, n, head_dim]` in the layout's dtype. new: 0 when every query sees the whole run, or n when the queries are
    those of its last n tokens and attend causally. top: float32 `[q_heads, n]`, where given takes the largest q.k. Returns the
    state, its output in q's dtype.
    """
    out = np.empty(q.shape, q.dtype)
    lse = np.empty(q.shape[:2], np.float32)
    started = perf_counter_ns()
    _native.attend(layout.native, bits(q), run.addresses, run.counts, new, scale, bits(out), lse, top)
    spent = perf_counter_ns() - started
    return AttentionState(out, lse), Reading(run.tokens, run.tokens, run.tokens * layout.token_nbytes, spent)


@dataclass(frozen=True)
class Whole:
    """The state over blocks that are read whole; top: float32 `[q_heads, n]`, the largest q.k, -inf for none."""

    state: AttentionState
    top: Array


def whole(layout: BlockLayout, addresses: Addresses, counts: Counts, q: Array, new: int, scale: float) -> Whole:
    """`exact` over chosen blocks of a run, in float32, ready to be merged."""
    out = np.empty(q.shape, np.float32)
    lse, top = np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
    _native.attend(layout.native, bits(q), addresses, counts, new, scale, out, lse, top)
    return Whole(AttentionState(out, lse), top)
