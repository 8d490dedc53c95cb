"""The CPU tier: blocks in main memory."""

from threading import Lock

import numpy as np

from kvdb.errors import CapacityError
from kvdb.storage.arena import Arena
from kvdb.storage.ledger import Counted
from kvdb.storage.tier import Blocks
from kvdb.types import Addresses, TierStats


class CpuBudget:
    """Bytes that all CPU tiers of one database may take together. limit: None for no limit."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._taken = 0
        self._lock = Lock()

    def holds(self, nbytes: int) -> bool:
        """Whether `nbytes` more would fit now."""
        return self.limit is None or self._taken + nbytes <= self.limit

    def take(self, nbytes: int) -> None:
        """Raises CapacityError when the budget does not hold `nbytes` more."""
        with self._lock:
            if not self.holds(nbytes):
                raise CapacityError(
                    f"the CPU tier needs {nbytes:,} bytes more and holds {self._taken:,} of storage.cpu_bytes_max={self.limit}; "
                    "drop contexts, close sessions or raise the budget"
                )
            self._taken += nbytes

    def give(self, nbytes: int) -> None:
        with self._lock:
            self._taken -= nbytes


class CpuTier(Counted):
    """A `Tier` over arenas of main memory. Grows by an arena at a time, never moves a block, and is thread-safe."""

    name = "cpu"

    def __init__(self, block_nbytes: int, arena_bytes: int, budget: CpuBudget) -> None:
        super().__init__()
        self.block_nbytes = block_nbytes
        self._per_arena = max(1, arena_bytes // block_nbytes)
        self._budget = budget
        self._arenas: list[Arena] = []
        self._addresses: Addresses = np.zeros(0, np.uint64)  # of each physical block

    def allocate(self, count: int) -> Blocks:
        with self._lock:
            while self._ledger.free < count:
                self._grow(count - self._ledger.free)
            return self._ledger.take(count)

    def addresses(self, blocks: Blocks) -> Addresses:
        return self._addresses[blocks]

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                name=self.name,
                blocks_used=self._ledger.used,
                blocks_total=self._ledger.total,
                block_nbytes=self.block_nbytes,
                nbytes=sum(a.nbytes for a in self._arenas),
                huge=all(a.huge for a in self._arenas),
            )

    def close(self) -> None:
        with self._lock:
            for arena in self._arenas:
                self._budget.give(arena.nbytes)
                arena.close()
            self._arenas = []

    def _grow(self, missing: int) -> None:
        """One more arena; near the budget's end a smaller one that just holds what is missing."""
        count = self._per_arena
        if not self._budget.holds(count * self.block_nbytes):
            count = min(missing, count)
        nbytes = count * self.block_nbytes
        self._budget.take(nbytes)
        try:
            arena = Arena(nbytes)
        except OSError as error:
            self._budget.give(nbytes)
            raise CapacityError(f"the system gives no {nbytes:,} bytes more: {error.strerror}") from None
        self._arenas.append(arena)
        slots = np.arange(count, dtype=np.uint64) * np.uint64(self.block_nbytes) + np.uint64(arena.address)
        self._addresses = np.concatenate([self._addresses, slots])
        self._ledger.grow(count)
