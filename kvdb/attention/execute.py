"""Carrying out a plan: every access path answers with a state, and the states are merged."""

from time import perf_counter_ns

import numpy as np

import kvdb._native as _native
from kvdb.attention.run import Run
from kvdb.attention.state import AttentionState
from kvdb.storage.block import BlockLayout, bits
from kvdb.types import Array


def exact(layout: BlockLayout, run: Run, q: Array, new: int, scale: float) -> tuple[AttentionState, int]:
    """Attention over every token of a run, by the native kernel: one launch for all parts that lie in main memory.

    q: `[q_heads, n, head_dim]` in the layout's dtype. new: 0 when every query sees the whole run, or n when the queries are
    those of its last n tokens and attend causally. Returns the state, its output in q's dtype, and the kernel's nanoseconds.
    """
    out = np.empty(q.shape, q.dtype)
    lse = np.empty(q.shape[:2], np.float32)
    started = perf_counter_ns()
    _native.attend(layout.native, bits(q), run.addresses, run.counts, new, scale, bits(out), lse)
    return AttentionState(out, lse), perf_counter_ns() - started
