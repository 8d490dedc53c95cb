"""The bookkeeping of slots that every tier shares: free lists and reference counts."""

from bisect import bisect, insort
from collections.abc import Sequence
from threading import RLock

import numpy as np
import numpy.typing as npt

from kvdb.errors import IntegrityError
from kvdb.storage.tier import Blocks

Int32 = npt.NDArray[np.int32]


class FreeList:
    """The free slots of one extent [first, first + total), as a stack whose last slot is taken next."""

    def __init__(self, first: int, total: int) -> None:
        self.first = first
        self.total = total
        self.free = total
        self._stack = np.arange(first + total - 1, first - 1, -1, dtype=np.int64)

    @property
    def slots(self) -> Blocks:
        return self._stack[: self.free]

    def take(self, count: int) -> Blocks:
        """Take `count` slots, in ascending order if none was ever given back."""
        self.free -= count
        return self._stack[self.free : self.free + count][::-1].copy()

    def give(self, slots: Blocks) -> None:
        self._stack[self.free : self.free + len(slots)] = slots[::-1]
        self.free += len(slots)


class SlotAllocator:
    """Which slots are free, and how many owners the others have. Not thread-safe: its tier locks.

    Slots are numbers, which come and go in ranges called extents. Slots are taken from the first extents that have free ones, so
    that later extents become empty. total: the slots of all extents; free: those without an owner.
    """

    def __init__(self) -> None:
        self.total = self.free = 0
        self._references: Int32 = np.zeros(0, np.int32)
        self._extent_of: Int32 = np.zeros(0, np.int32)  # where the extent of each slot begins
        self._extents: dict[int, FreeList] = {}  # by their first slot
        self._with_room: list[int] = []  # first slots of extents that have a free one, ascending
        self._gaps: list[tuple[int, int]] = []  # ranges of numbers that no extent has, ascending

    @property
    def used(self) -> int:
        return self.total - self.free

    def add(self, count: int) -> int:
        """Add an extent of `count` free slots. Returns its first slot. Numbers of removed extents are used again."""
        first = self._unused(count)
        self._extents[first] = FreeList(first, count)
        self._extent_of[first : first + count] = first
        insort(self._with_room, first)
        self.free += count
        self.total += count
        return first

    def remove(self, first: int) -> None:
        """Remove the extent that begins there, none of whose slots has an owner."""
        extent = self._extents.pop(first)
        assert extent.free == extent.total, "an extent in use was removed"
        self._with_room.remove(first)
        self.free -= extent.total
        self.total -= extent.total
        self._add_gap(first, first + extent.total)

    def is_empty(self, first: int) -> bool:
        """Whether no slot of the extent that begins there has an owner."""
        return self._extents[first].free == self._extents[first].total

    def take(self, count: int) -> Blocks:
        """Take `count` slots, with one reference each; at least as many must be free."""
        assert count <= self.free
        taken: list[Blocks] = []
        missing = count
        while missing:
            extent = self._extents[self._with_room[0]]
            taken.append(extent.take(min(missing, extent.free)))
            missing -= len(taken[-1])
            if not extent.free:
                del self._with_room[0]
        slots = taken[0] if len(taken) == 1 else np.concatenate([np.zeros(0, np.int64), *taken])
        self.free -= count
        self._references[slots] = 1
        return slots

    def retain(self, slots: Blocks) -> None:
        assert (self._references[slots] > 0).all(), "a free block was retained"
        self._references[slots] += 1

    def release(self, slots: Blocks) -> list[int]:
        """Drop one reference to each slot. Returns the first slots of the extents that became empty."""
        left = self._references[slots] - 1
        assert (left >= 0).all(), "a free block was released"
        self._references[slots] = left
        gone = slots[left == 0]
        self.free += len(gone)
        firsts = self._extent_of[gone]
        if len(gone) and (firsts == firsts[0]).all():  # nearly always
            return self._give(int(firsts[0]), gone)
        return [first for first in np.unique(firsts).tolist() for first in self._give(first, gone[firsts == first])]

    def references(self, slot: int) -> int:
        return int(self._references[slot])

    def check_integrity(self, owned: Sequence[Blocks] | None = None) -> None:
        """Raises IntegrityError unless free and used slots are disjoint, complete and rightly counted.

        owned: the slots of every owner; if given, each slot must have as many references as owners.
        """
        free = np.concatenate([np.zeros(0, np.int64), *(extent.slots for extent in self._extents.values())])
        if len(np.unique(free)) != len(free):
            raise IntegrityError("a block stands in the free list twice")
        if len(free) != self.free or sum(extent.total for extent in self._extents.values()) != self.total:
            raise IntegrityError(f"the extents do not add up to {self.free} free of {self.total} blocks")
        used = self._references > 0
        if used[free].any():
            raise IntegrityError(f"{int(used[free].sum())} blocks are both free and used")
        if int(used.sum()) + len(free) != self.total:
            raise IntegrityError(f"{int(used.sum())} used + {len(free)} free blocks are not the {self.total} there are")
        if (self._references < 0).any():
            raise IntegrityError("a block has a negative count of references")
        if owned is not None:
            blocks = np.concatenate([np.zeros(0, np.int64), *owned])
            owners = np.bincount(blocks, minlength=len(self._references))
            if len(owners) > len(self._references):
                raise IntegrityError(f"block {int(blocks.max())} is owned and does not exist")
            wrong = np.flatnonzero(owners != self._references)
            if len(wrong):
                raise IntegrityError(f"block {wrong[0]} and {len(wrong) - 1} others have not as many references as owners")

    def _give(self, first: int, slots: Blocks) -> list[int]:
        """Put slots of one extent on its free list. Returns the extent if it became empty."""
        extent = self._extents[first]
        if not extent.free:
            insort(self._with_room, first)
        extent.give(slots)
        return [first] if extent.free == extent.total else []

    def _unused(self, count: int) -> int:
        """The first of `count` numbers in a row that no extent has."""
        for i, (begin, end) in enumerate(self._gaps):
            if end - begin >= count:
                self._gaps[i : i + 1] = [(begin + count, end)] if end - begin > count else []
                return begin
        first = len(self._references)
        self._references = np.concatenate([self._references, np.zeros(count, np.int32)])
        self._extent_of = np.concatenate([self._extent_of, np.zeros(count, np.int32)])
        return first

    def _add_gap(self, begin: int, end: int) -> None:
        """Add a range of unused numbers, joined with those beside it."""
        i = bisect(self._gaps, (begin, end))
        if i < len(self._gaps) and self._gaps[i][0] == end:
            end = self._gaps.pop(i)[1]
        if i and self._gaps[i - 1][1] == begin:
            begin = self._gaps.pop(i - 1)[0]
        insort(self._gaps, (begin, end))


class CountedTier:
    """The reference counts of a tier, behind its lock; see `kvdb.storage.tier.Tier`. Thread-safe.

    changes: the number of times that references were taken or released.
    """

    def __init__(self, lock: "RLock | None" = None) -> None:
        """lock: the lock that the tier shares with other tiers whose room it may need; None for a lock of its own."""
        self._lock = lock or RLock()
        self._slots = SlotAllocator()
        self.changes = 0

    def make_room(self, count: int) -> None:
        """Nothing: this tier holds no contexts that could go."""

    def retain(self, blocks: Blocks) -> None:
        with self._lock:
            self.changes += 1
            self._slots.retain(blocks)

    def release(self, blocks: Blocks) -> None:
        with self._lock:
            self.changes += 1
            for extent in self._slots.release(blocks):
                self._emptied(extent)

    def shared(self, block: int) -> bool:
        return self._slots.references(block) > 1

    def check_integrity(self, owned: Sequence[Blocks] | None = None) -> None:
        """See `Tier.check_integrity`."""
        with self._lock:
            self._slots.check_integrity(owned)

    def _take(self, count: int) -> Blocks:
        """Take `count` blocks, at most as many as are free; called with the lock held."""
        self.changes += 1
        return self._slots.take(count)

    def _emptied(self, extent: int) -> None:
        """Called, with the lock held, when no slot of the extent that begins there is used any more."""
