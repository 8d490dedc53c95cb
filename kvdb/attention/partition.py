"""How one layer's run is divided: spans that are searched, spans that are read whole for some KV heads, and the window."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from indexes.base import Index
from indexes.retrieval import Retrieval
from kvdb.attention.block_run import BlockReads, BlockRun, Span, Words
from kvdb.attention.device import DeviceAttention
from kvdb.attention.observation import Observation
from kvdb.blend.rope_shift import Turn
from kvdb.types import Float32

HeadMask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SearchedSpan:
    """A span that an index searches. retrieval: None for the query's own. active_heads: bool `[kv_heads]`, the KV heads for which
    it is searched, None for all.

    estimate_tail: whether the attention over tokens that are not retrieved is estimated. observe: receives the observation of an
    observed query. turn: rotates queries for keys that were moved. hidden: a bit for each token of the segment, set if no query
    sees it.
    """

    index: Index
    span: Span
    retrieval: Retrieval | None = None
    active_heads: HeadMask | None = None
    estimate_tail: bool = False
    observe: Callable[[Observation], None] | None = None
    turn: Turn | None = None
    hidden: Words | None = None


@dataclass(frozen=True)
class ExactSpan:
    """A span that is read whole for some KV heads, bool `[kv_heads]`, while it is searched for others."""

    span: Span
    heads: HeadMask


class RunPartition:
    """The division of a run, which may grow behind the searched spans.

    whole: spans that are searched for some KV heads and read whole for others. device: answers the spans that the CPU leaves out,
    None if there are none. sinks: blocks [first, last) of the run that hold sink tokens, which are part of the window. guards:
    float32 `[kv_heads]`, the logarithm of the mass that a KV head may leave out, relative to the mass it reads; a head that is
    estimated to miss more is read whole. None if there is no such limit. ranges: float32 `[2, SIGNS, q_heads]`, the least and the
    largest of each sign (`kvdb.attention.signs`); a head of which one is outside is read whole. None for no ranges. steps: what
    `kvdb.attention.step` prepared of it, by what it is for. widens: whether a bound on the missed mass took more than one search.
    """

    def __init__(
        self,
        searched: Sequence[SearchedSpan],
        block_size: int,
        whole: Sequence[ExactSpan] = (),
        device: DeviceAttention | None = None,
        sinks: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.searched = tuple(searched)
        self.whole = tuple(whole)
        self.device = device
        self.guards: Float32 | None = None
        self.ranges: Float32 | None = None
        self.steps: dict[Any, Any] = {}
        self.widens = False
        self.observes = any(part.observe is not None for part in self.searched)
        parts: tuple[SearchedSpan | ExactSpan, ...] = (*searched, *whole)
        spans = {part.span for part in parts}
        elsewhere = () if device is None else device.spans
        self.tokens = sum(span.tokens for span in spans)
        self._block_size = block_size
        self._grows = device is None or not device.tail
        not_window = [self._blocks(span) for span in (*spans, *elsewhere)]
        self.sinks = tuple(sink for sink in sinks if not any(_overlap(sink, blocks) for blocks in not_window))
        self._window = _Outside(not_window, self._grows)
        self._window_behind_sinks = _Outside([*not_window, *self.sinks], self._grows)
        self._cpu = _Outside([self._blocks(span) for span in elsewhere], self._grows)
        self._sink_reads: BlockReads | None = None
        self._until: int | None = None

    def fixed_window(self, run: BlockRun) -> tuple[BlockReads, int]:
        """The blocks of the window, which is read whole on the CPU, that no later token changes, and the block of the run from
        which on all others belong to the window; -1 if none do. run: the same one, with the same overlay, at each call."""
        return self._window.fixed(run)

    def fixed_window_behind_sinks(self, run: BlockRun) -> tuple[BlockReads, int]:
        """`fixed_window` without blocks that hold sink tokens."""
        return self._window_behind_sinks.fixed(run)

    def sink_blocks(self, run: BlockRun) -> BlockReads:
        """The blocks of the window that hold sink tokens, at least one; no later token changes them."""
        if self._sink_reads is None:
            self._sink_reads = run.part(*(slice(*sink) for sink in self.sinks))
        return self._sink_reads

    def cpu_blocks(self, run: BlockRun) -> BlockReads:
        """The blocks that the CPU answers."""
        return self._cpu.of(run)

    def causal(self, n: int) -> int:
        """How many of n queries need a causal mask: n if their own tokens are among those that the CPU reads, otherwise 0."""
        return n if n > 1 and self._grows else 0  # one query sees everything, also if its own token is searched

    def behind(self, run: BlockRun) -> int:
        """The number of tokens behind all searched spans: queries of this many last tokens see all of these spans."""
        if self._until is None:
            self._until = int(run.counts[: self._window.until].sum())
        return run.read_tokens - self._until

    def blocks(self, run: BlockRun, span: Span) -> BlockReads:
        """The blocks of a span."""
        return run.part(slice(*self._blocks(span)))

    def _blocks(self, span: Span) -> tuple[int, int]:
        size = self._block_size
        assert span.begin % size == 0
        return span.first_block + span.begin // size, span.first_block + -(-span.end // size)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


class _Outside:
    """The blocks of a run that lie outside of some ranges. grows: whether the tail's new blocks belong to them.

    until: the block behind the last range.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], grows: bool) -> None:
        edges = [0, *(block for begin, end in sorted(ranges) for block in (begin, end))]
        self._edges = [slice(begin, end) for begin, end in list(pairwise(edges))[::2]]
        self.until = edges[-1]
        self._grows = grows
        self._fixed: BlockReads | None = None
        self._base = 0

    def of(self, run: BlockRun) -> BlockReads:
        """run: must be the same one, with the same overlay, at each call."""
        fixed, base = self.fixed(run)
        if base < 0:
            return fixed
        addresses, counts, placement = fixed
        grown = slice(base, None)
        return BlockReads(
            np.concatenate([addresses, run.addresses[grown]]), np.concatenate([counts, run.counts[grown]]), placement
        )

    def fixed(self, run: BlockRun) -> tuple[BlockReads, int]:
        """The blocks that no later token changes, and the block from which on all others follow; -1 if none do."""
        if self._fixed is None:
            self._base = max(self.until, run.base_blocks)
            self._fixed = run.part(*self._edges, slice(self.until, self._base))
        return self._fixed, self._base if self._grows else -1
