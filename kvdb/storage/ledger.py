"""The bookkeeping of slots that every tier shares: free list, reference counts, pins."""

from collections.abc import Sequence
from threading import Lock

import numpy as np

from kvdb.errors import IntegrityError
from kvdb.storage.tier import Blocks


class Ledger:
    """Which of `total` slots are free, and how many owners and pins the others have. Not thread-safe: its tier locks."""

    def __init__(self) -> None:
        self._references = np.zeros(0, np.int32)
        self._pins = np.zeros(0, np.int32)
        self._free: Blocks = np.zeros(0, np.int64)  # a stack: [0, free) are free slots, the last is taken next
        self.free = 0

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def used(self) -> int:
        return self.total - self.free

    def grow(self, count: int) -> None:
        """Add `count` free slots behind the others; they are taken in ascending order."""
        old, new = self.total, self.total + count
        free = np.empty(new, np.int64)
        free[:count] = np.arange(new - 1, old - 1, -1)
        free[count : count + self.free] = self._free[: self.free]
        self._free, self.free = free, self.free + count
        self._references = np.concatenate([self._references, np.zeros(count, np.int32)])
        self._pins = np.concatenate([self._pins, np.zeros(count, np.int32)])

    def take(self, count: int) -> Blocks:
        assert count <= self.free
        blocks = self._free[self.free - count : self.free][::-1].copy()
        self.free -= count
        self._references[blocks] = 1
        return blocks

    def retain(self, blocks: Blocks) -> None:
        assert (self._references[blocks] > 0).all(), "a free block was retained"
        self._references[blocks] += 1

    def release(self, blocks: Blocks) -> None:
        assert (self._references[blocks] > 0).all(), "a free block was released"
        self._references[blocks] -= 1
        gone = blocks[self._references[blocks] == 0]
        assert not self._pins[gone].any(), "a pinned block was freed"
        self._free[self.free : self.free + len(gone)] = gone[::-1]
        self.free += len(gone)

    def pin(self, blocks: Blocks) -> None:
        assert (self._references[blocks] > 0).all(), "a free block was pinned"
        self._pins[blocks] += 1

    def unpin(self, blocks: Blocks) -> None:
        assert (self._pins[blocks] > 0).all(), "an unpinned block was unpinned"
        self._pins[blocks] -= 1

    def references(self, block: int) -> int:
        return int(self._references[block])

    def check_integrity(self, owned: Sequence[Blocks] | None = None) -> None:
        """Raises IntegrityError unless free and used slots are disjoint, complete and rightly counted.

        owned: the blocks of every owner; then each block must have as many references as owners.
        """
        free = self._free[: self.free]
        if len(np.unique(free)) != len(free):
            raise IntegrityError("a block stands in the free list twice")
        used = self._references > 0
        if used[free].any():
            raise IntegrityError(f"{int(used[free].sum())} blocks are both free and used")
        if int(used.sum()) + len(free) != self.total:
            raise IntegrityError(f"{int(used.sum())} used + {len(free)} free blocks are not the {self.total} there are")
        if (self._pins < 0).any() or (self._references < 0).any() or self._pins[free].any():
            raise IntegrityError("a block has a negative count, or is pinned while free")
        if owned is not None:
            blocks = np.concatenate([np.zeros(0, np.int64), *owned])
            wrong = np.flatnonzero(np.bincount(blocks, minlength=self.total) != self._references)
            if len(wrong):
                raise IntegrityError(f"block {wrong[0]} and {len(wrong) - 1} others have not as many references as owners")


class Counted:
    """What every tier of memory does with its ledger, thread-safe; see `kvdb.storage.tier.Tier`."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._lock = Lock()

    def retain(self, blocks: Blocks) -> None:
        with self._lock:
            self._ledger.retain(blocks)

    def release(self, blocks: Blocks) -> None:
        with self._lock:
            self._ledger.release(blocks)

    def pin(self, blocks: Blocks) -> None:
        with self._lock:
            self._ledger.pin(blocks)

    def unpin(self, blocks: Blocks) -> None:
        with self._lock:
            self._ledger.unpin(blocks)

    def shared(self, block: int) -> bool:
        return self._ledger.references(block) > 1

    def check_integrity(self, owned: Sequence[Blocks] | None = None) -> None:
        with self._lock:
            self._ledger.check_integrity(owned)
