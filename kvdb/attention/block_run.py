"""The blocks that one layer of a session reads, in order: those of its views, of its overlay, and of its tail."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import kvdb._native as _native
from kvdb.blend.rope_shift import RopeShifts, hidden_words
from kvdb.storage.block_table import BlockTable
from kvdb.types import Addresses, Positions

Counts = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
WORD = 64
"""Bits of a word."""


class Span(NamedTuple):
    """Tokens [begin, end) of one segment or tail. Both are multiples of the block size, except where `end` is the last visible
    token. first_block: the number of the segment's or the tail's first block in the run."""

    begin: int
    end: int
    first_block: int

    @property
    def tokens(self) -> int:
        return self.end - self.begin


class BlockReads(NamedTuple):
    """Blocks for the kernels. placement: which blocks were moved and which of their tokens are hidden, None for neither."""

    addresses: Addresses
    counts: Counts
    placement: _native.Placement | None = None


class BlendedViews(NamedTuple):
    """Where the views of a blended session stand.

    begins: the position of each view's first token. length: the number of positions before the tail. overlay: the overlay.
    """

    begins: Sequence[int]
    length: int
    moves: RopeShifts
    overlay: BlockTable


class BlockRun:
    """Block addresses, and how many tokens of each block count, updated as the tail grows.

    parts: the block table of each segment view and the number of its visible tokens; they never change. tail: the session's own
    tokens, which grow. blended: None where the views are a prefix, each at the positions it was computed at. version: changes
    when the blocks before the tail do.
    """

    def __init__(self, parts: list[tuple[BlockTable, int]], tail: BlockTable, blended: BlendedViews | None = None) -> None:
        self._parts = parts
        self._tail = tail
        self._blended = blended
        self._block_size = tail.layout.block_size
        self._view: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._hidden: Words | None = None
        self._placement: _native.Placement | None = None
        self.base_tokens = sum(visible for _, visible in parts) if blended is None else blended.length
        self.overlaid: Positions = np.zeros(0, np.int64)
        self.version = 0
        self.update_overlay(self.overlaid)

    def update_overlay(self, overlaid: Positions) -> None:
        """Update the run for an overlay whose row i is the token at position overlaid[i]."""
        tables = list(self._parts)
        self.overlaid = overlaid
        self.version += 1
        if self._blended is not None and len(overlaid):
            tables.append((self._blended.overlay, len(overlaid)))
        addresses = [table.tagged[: -(-visible // self._block_size)] for table, visible in tables]
        counts = [_counts(visible, self._block_size) for _, visible in tables]
        self._base = self._capacity = self.blocks = sum(len(a) for a in addresses)
        self._base_read = sum(visible for _, visible in tables)
        self._addresses: Addresses = np.concatenate([np.empty(0, np.uint64), *addresses])
        self._counts: Counts = np.concatenate([np.empty(0, np.int32), *counts])
        if self._blended is not None:
            self._place(self._blended)
        self.refresh(0)

    @property
    def tokens(self) -> int:
        """The position behind the last token."""
        return self.base_tokens + self._tail.length

    @property
    def block_size(self) -> int:
        """The most tokens of a block."""
        return self._block_size

    @property
    def read_tokens(self) -> int:
        """The number of tokens in its blocks, where the tokens of an overlay and those that they hide count both."""
        return self._base_read + self._tail.length

    @property
    def addresses(self) -> Addresses:
        """uint64 `[blocks]`."""
        return self._addresses[: self.blocks]

    @property
    def counts(self) -> Counts:
        """int32 `[blocks]`."""
        return self._counts[: self.blocks]

    @property
    def arrays(self) -> tuple[Addresses, Counts]:
        """The arrays that `addresses` and `counts` are the beginnings of. Native code that adds tokens to the last block, and
        to those behind it that the tail took ahead, counts them there."""
        return self._addresses, self._counts

    @property
    def all_blocks(self) -> BlockReads:
        """All blocks."""
        return BlockReads(self.addresses, self.counts, self._placement)

    @property
    def views(self) -> list[slice]:
        """The blocks of each view."""
        ends = np.cumsum([0, *(-(-visible // self._block_size) for _, visible in self._parts)]).tolist()
        return [slice(begin, end) for begin, end in pairwise(ends)]

    @property
    def base_blocks(self) -> int:
        """How many blocks come before those of the tail."""
        return self._base

    def part(self, *slices: slice) -> BlockReads:
        """The blocks of each slice, in this order."""
        addresses, counts = (np.concatenate([array[s] for s in slices]) for array in (self.addresses, self.counts))
        if self._placement is None:
            return BlockReads(addresses, counts)
        ranges = [np.arange(*s.indices(self.blocks)) for s in slices]
        return BlockReads(addresses, counts, self._placed(np.concatenate(ranges)))

    def hidden_in_view(self, view: int) -> Words | None:
        """A bit for each token of a view's segment, visible or not, set if the token is overlaid; None if none is."""
        if self._blended is None or not len(self.overlaid):
            return None
        table, visible = self._parts[view]
        words = np.zeros(-(-table.length // WORD), np.uint64)
        seen = hidden_words(self._blended.begins[view], visible, WORD, self.overlaid).ravel()
        words[: len(seen)] = seen
        return words if words.any() else None

    def hidden_in_blocks(self, first: int, last: int) -> Words | None:
        """A bit for each token of blocks [first, last) of one view, set if the token is overlaid: uint64 `[blocks, words]`; None
        if none is."""
        words = None if self._hidden is None else self._hidden[first:last]
        return words if words is not None and words.any() else None

    def refresh(self, start: int) -> None:
        """Update the run for the tail's tokens from `start` on; blocks before that token have not changed."""
        tail, first = self._tail.addresses, start // self._block_size
        used, end = self._tail.layout.blocks_for(self._tail.length), self._base + len(tail)
        self.blocks = self._base + used
        if end > self._capacity:
            self._grow(max(end, 2 * self._capacity))
        self._addresses[self._base + first : end] = tail[first:]
        self._counts[self._base + first : self.blocks] = self._block_size
        self._counts[self.blocks : end] = 0  # blocks that were taken ahead
        if used:
            self._counts[self.blocks - 1] = self._tail.length - (used - 1) * self._block_size

    def _place(self, blended: BlendedViews) -> None:
        """Set the rotation and the hidden tokens of each block. Blocks behind those of the views were not moved."""
        blocks = [-(-visible // self._block_size) for _, visible in self._parts]
        self._view = np.repeat(blended.moves.of_view, blocks).astype(np.int32)
        self._hidden = None
        if len(self.overlaid):
            views = zip(blended.begins, self._parts, strict=True)
            words = [hidden_words(begin, visible, self._block_size, self.overlaid) for begin, (_, visible) in views]
            self._hidden = np.concatenate(words) if words else None
        self._placement = self._placed(np.arange(len(self._view)))

    def _placed(self, blocks: npt.NDArray[np.int64]) -> _native.Placement | None:
        """The placement of some blocks of the run."""
        assert self._blended is not None
        moves, fixed = self._blended.moves, len(self._view)
        kept = blocks[blocks < fixed]  # blocks behind these are not moved, and come last
        view = self._view[kept]
        hidden = None if self._hidden is None else self._hidden[kept]
        if (view < 0).all() and (hidden is None or not hidden.any()):
            return None
        return _native.Placement(view, moves.cos, moves.sin, moves.interleaved, hidden)

    def _grow(self, capacity: int) -> None:
        more = capacity - self._capacity
        self._addresses = np.concatenate([self._addresses, np.empty(more, np.uint64)])
        self._counts = np.concatenate([self._counts, np.empty(more, np.int32)])
        self._capacity = capacity


def _counts(tokens: int, block_size: int) -> Counts:
    counts = np.full(-(-tokens // block_size), block_size, np.int32)
    counts[-1] = tokens - (len(counts) - 1) * block_size
    return counts
