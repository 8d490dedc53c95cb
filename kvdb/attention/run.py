"""The blocks that one layer of a session reads, in order: its views', then its tail's."""

import numpy as np
import numpy.typing as npt

from kvdb.storage.table import BlockTable
from kvdb.types import Addresses

Counts = npt.NDArray[np.int32]


class Run:
    """Block addresses and how many tokens of each count, kept in step with a growing tail.

    parts: the block tables of the segment views with the tokens visible of each, fixed. tail: grows.
    """

    def __init__(self, parts: list[tuple[BlockTable, int]], tail: BlockTable) -> None:
        self._tail = tail
        self._block_size = tail.layout.block_size
        addresses = [table.addresses[: -(-visible // self._block_size)] for table, visible in parts]
        counts = [_counts(visible, self._block_size) for _, visible in parts]
        self._base = sum(len(a) for a in addresses)
        self._capacity = self._base
        self._addresses: Addresses = np.concatenate([np.empty(0, np.uint64), *addresses])
        self._counts: Counts = np.concatenate([np.empty(0, np.int32), *counts])
        self.base_tokens = sum(visible for _, visible in parts)
        self.blocks = self._base
        self.refresh(0)

    @property
    def tokens(self) -> int:
        return self.base_tokens + self._tail.length

    @property
    def addresses(self) -> Addresses:
        """uint64 `[blocks]`."""
        return self._addresses[: self.blocks]

    @property
    def counts(self) -> Counts:
        """int32 `[blocks]`."""
        return self._counts[: self.blocks]

    def refresh(self, start: int) -> None:
        """Take over the tail's tokens from `start` on; the blocks before that token's are as they were."""
        tail, first = self._tail.addresses, start // self._block_size
        if not len(tail):
            return
        self.blocks = self._base + len(tail)
        if self.blocks > self._capacity:
            self._grow(max(self.blocks, 2 * self._capacity))
        self._addresses[self._base + first : self.blocks] = tail[first:]
        self._counts[self._base + first : self.blocks] = self._block_size
        self._counts[self.blocks - 1] = self._tail.length - (len(tail) - 1) * self._block_size

    def _grow(self, capacity: int) -> None:
        more = capacity - self._capacity
        self._addresses = np.concatenate([self._addresses, np.empty(more, np.uint64)])
        self._counts = np.concatenate([self._counts, np.empty(more, np.int32)])
        self._capacity = capacity


def _counts(tokens: int, block_size: int) -> Counts:
    counts = np.full(-(-tokens // block_size), block_size, np.int32)
    counts[-1] = tokens - (len(counts) - 1) * block_size
    return counts
