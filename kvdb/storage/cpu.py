"""The CPU tier: blocks in main memory."""

import ctypes

import numpy as np

from indexes.arena import HUGE_PAGE, Arena
from kvdb.errors import CapacityError
from kvdb.storage.budget import CpuBudget
from kvdb.storage.room import with_room
from kvdb.storage.slots import CountedTier
from kvdb.storage.tier import Blocks
from kvdb.types import Addresses, TierStats

SPARE_BYTES_MAX = 1 << 30
"""Bytes of unused arenas that a tier keeps; they count in the budget."""


class CpuTier(CountedTier):
    """A `Tier` over arenas of main memory, which never moves a block. Thread-safe.

    The first arena is a huge page, each further one as large as all before it, `arena_bytes` at most; near the budget's end they
    become smaller, so that other tiers find room too. Unused arenas are kept for later allocations, because fresh memory costs
    several times as much as writing to it. Those beyond SPARE_BYTES_MAX go back to the system, and all of them do when the budget
    has no room left for another tier.
    """

    name = "cpu"

    def __init__(self, block_nbytes: int, arena_bytes: int, budget: CpuBudget, *, overwrites: bool = False) -> None:
        """overwrites: whether blocks are zeros when they are allocated, whatever stood there."""
        super().__init__(budget.lock)
        self.block_nbytes = block_nbytes
        self._arena_bytes = arena_bytes
        self._overwrites = overwrites
        self._budget = budget
        self._arenas: dict[int, Arena] = {}  # by the first block of their extent
        self._empty: set[int] = set()  # extents without a used slot
        self._addresses: Addresses = np.zeros(0, np.uint64)  # of each physical block
        self._closed = False
        budget.register(lambda _: self._trim())

    def allocate(self, count: int, *, evict: bool = False) -> Blocks:
        if evict:
            blocks = with_room(lambda: self._allocate(count), self._budget.evict, count * self.block_nbytes)
        else:
            blocks = self._allocate(count)
        if self._overwrites:
            for address in self._addresses[blocks].tolist():
                ctypes.memset(address, 0, self.block_nbytes)
        return blocks

    def make_room(self, count: int) -> None:
        with_room(lambda: self._check(count), self._budget.evict, count * self.block_nbytes)

    def addresses(self, blocks: Blocks) -> Addresses:
        return self._addresses[blocks]

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                name=self.name,
                blocks_used=self._slots.used,
                blocks_total=self._slots.total,
                block_nbytes=self.block_nbytes,
                nbytes=sum(arena.nbytes for arena in self._arenas.values()),
                huge=all(arena.huge is not False for arena in self._arenas.values()),
            )

    def close(self) -> None:
        with self._lock:
            for arena in self._arenas.values():
                self._budget.give(arena.nbytes)
                arena.close()
            self._arenas, self._empty, self._closed = {}, set(), True

    def _allocate(self, count: int) -> Blocks:
        with self._lock:
            self._check(count)
            try:
                while count > self._slots.free:
                    self._grow(count - self._slots.free)
            except CapacityError:
                self._trim(SPARE_BYTES_MAX)
                raise
            blocks = self._take(count)
            if self._empty:
                self._empty = {extent for extent in self._empty if self._slots.is_empty(extent)}
            return blocks

    def _check(self, count: int) -> None:
        """Raises CapacityError unless `count` blocks are free or have room in the budget."""
        with self._lock:
            missing = 0
            while missing < count - self._slots.free:  # again, because the check may have released free arenas
                missing = count - self._slots.free
                self._budget.check(missing * self.block_nbytes)

    def _grow(self, missing: int) -> None:
        """Add an arena, with only the missing blocks where the budget is nearly spent. Raises CapacityError."""
        nbytes = min(max(HUGE_PAGE, self._slots.total * self.block_nbytes), self._arena_bytes)
        if self._budget.left is not None:
            nbytes = min(nbytes, self._budget.left // 2)
        most = max(1, self._arena_bytes // self.block_nbytes)
        count = min(max(missing, nbytes // self.block_nbytes), most)
        nbytes = count * self.block_nbytes
        self._budget.take(nbytes)
        try:
            arena = Arena(nbytes)
        except OSError as error:
            self._budget.give(nbytes)
            raise CapacityError(f"the system gives no {nbytes:,} bytes more: {error.strerror}") from None
        first = self._slots.add(count)
        self._arenas[first] = arena
        self._empty.add(first)
        more = first + count - len(self._addresses)
        if more > 0:
            self._addresses = np.concatenate([self._addresses, np.zeros(more, np.uint64)])
        slots = np.arange(count, dtype=np.uint64) * np.uint64(self.block_nbytes)
        self._addresses[first : first + count] = slots + np.uint64(arena.address)

    def _emptied(self, extent: int) -> None:
        if not self._closed:
            self._empty.add(extent)
            self._trim(SPARE_BYTES_MAX)

    def _trim(self, spare_nbytes: int = 0) -> None:
        """Give empty arenas back to the system, the smallest first, until those left have at most `spare_nbytes`."""
        spare = sum(self._arenas[extent].nbytes for extent in self._empty)
        for extent in sorted(self._empty, key=lambda number: self._arenas[number].nbytes):
            if spare <= spare_nbytes:
                return
            arena = self._arenas.pop(extent)
            spare -= arena.nbytes
            self._empty.remove(extent)
            self._slots.remove(extent)
            self._budget.give(arena.nbytes)
            arena.close()
