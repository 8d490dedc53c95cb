"""Exact attention over blocks, and the statistics of an attention call."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

import kvdb._native as _native
from indexes.base import Float32, SearchResult
from indexes.retrieval import Retrieval
from kvdb.attention.block_run import BlockReads, BlockRun
from kvdb.attention.partition import HeadMask, SearchedSpan
from kvdb.attention.state import AttentionState
from kvdb.storage.block_layout import BlockLayout
from kvdb.types import Array, Bools, bits


@dataclass(frozen=True)
class IndexSearch:
    """One search of one index: the retrieval, the result, and the nanoseconds it took."""

    part: SearchedSpan
    retrieval: Retrieval
    result: SearchResult
    ns: int


@dataclass(frozen=True)
class AttentionStats:
    """The statistics of one call. A token counts once for each group of query heads that shared its read.

    scanned: the number of tokens looked at in any form. retrieved: the number of tokens attended, the mean over the queries.
    nbytes: the number of bytes read. kernel_ns: the time of the call; search_ns and gather_ns: of its searches, and of what
    followed them. missed, missed_bound: the share of the softmax mass that was left out, as an estimate and as a bound, both
    means over the queries. missed_bound_max: the largest bound. searches: those that led to the answer to one query. lse: float32
    `[q_heads, n]`, over the tokens read, without estimates. missed_log: float32 `[q_heads, n]`, the logarithm of the estimated
    sum that was left out, -inf for none; None for an exact answer. given_up: bool `[q_heads, n]`, the queries that some search
    gave up; None where nothing was searched. signs: of searches (`kvdb.attention.signs`). unlike: bool `[kv_heads]`, the heads
    that were read whole because of them. Both None for none.
    """

    scanned: float
    retrieved: float
    nbytes: int
    kernel_ns: int
    missed: float = 0.0
    missed_bound: float = 0.0
    missed_bound_max: float = 0.0
    searches: Sequence[IndexSearch] = ()
    lse: Float32 | None = None
    missed_log: Float32 | None = None
    given_up: Bools | None = None
    signs: Float32 | None = None
    unlike: HeadMask | None = None
    search_ns: int = 0
    gather_ns: int = 0


def exact(  # noqa: PLR0913  # the kernel's
    layout: BlockLayout,
    run: BlockRun,
    q: Array,
    new: int,
    scale: float,
    top: Array | None = None,
    *,
    sinks: Float32 | None = None,
    window: int = 0,
) -> tuple[AttentionState, AttentionStats]:
    """Attention over every token of a run, by the native kernel: one launch for all parts that lie in main memory.

    q: `[q_heads, n, head_dim]` in the layout's dtype. new: 0 when every query sees the whole run, or n when the queries are those
    of its last n tokens and attend causally. top: float32 `[q_heads, n]`, if given, receives the largest q.k. sinks:
    float32 `[q_heads]`, a logit of each query head that weighs in the softmax and has no value, None for none. window: a query
    sees the last so many tokens up to its own, 0 for all. Returns the state, with its output in q's dtype.
    """
    state, spent = _attended(layout, run.all_blocks, q, new, scale, top, sinks, window)
    nbytes = layout.nbytes_of(run.addresses, run.counts)
    seen = min(run.tokens, window + max(new - 1, 0)) if window else run.tokens
    return state, AttentionStats(seen, seen, nbytes if seen == run.tokens else nbytes * seen // run.tokens, spent)


def exact_over(  # the kernel's
    layout: BlockLayout,
    reads: BlockReads,
    q: Array,
    new: int,
    scale: float,
    top: Array | None = None,
    *,
    sinks: Float32 | None = None,
) -> tuple[AttentionState, AttentionStats]:
    """`exact` over chosen blocks of a run, without a window."""
    state, spent = _attended(layout, reads, q, new, scale, top, sinks, 0)
    tokens = int(reads.counts.sum())
    return state, AttentionStats(tokens, tokens, layout.nbytes_of(reads.addresses, reads.counts), spent)


def _attended(  # noqa: PLR0913, PLR0917  # the kernel's
    layout: BlockLayout,
    reads: BlockReads,
    q: Array,
    new: int,
    scale: float,
    top: Array | None,
    sinks: Float32 | None,
    window: int,
) -> tuple[AttentionState, int]:
    """The state, its output in q's dtype, and the nanoseconds it took."""
    out = np.empty((*q.shape[:2], layout.value_dim), q.dtype)
    lse = np.empty(q.shape[:2], np.float32)
    started = perf_counter_ns()
    addresses, counts, placement = reads
    arrays = bits(q), addresses, counts, new, scale, bits(out), lse, top
    _native.attend(layout.native, *arrays, placement=placement, sinks=sinks, window=window)
    return AttentionState(out, lse), perf_counter_ns() - started


def attend_heads(  # noqa: PLR0913, PLR0917  # the kernel's
    layout: BlockLayout,
    reads: BlockReads,
    q: Array,
    scale: float,
    kv_heads: Sequence[int],
    out: Float32,
    lse: Float32,
    top: Float32 | None = None,
) -> None:
    """Attention of some KV heads, ascending, over chosen blocks that every query sees; the rows of others are left as they are.

    out: float32 `[q_heads, n, value_dim]`, lse: float32 `[q_heads, n]`. top: if given, receives the largest q.k, as
    lse.
    """
    addresses, counts, placement = reads
    begin = 0
    for i, head in enumerate(kv_heads):
        if i + 1 == len(kv_heads) or kv_heads[i + 1] != head + 1:
            run = kv_heads[begin], head + 1
            _native.attend(layout.native, bits(q), addresses, counts, 0, scale, out, lse, top, *run, placement=placement)
            begin = i + 1
