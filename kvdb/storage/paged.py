"""Blocks of main memory whose contents come and go while their addresses stay."""

import numpy as np

from indexes.arena import Arena
from kvdb.errors import CapacityError
from kvdb.storage.budget import CpuBudget
from kvdb.storage.ledger import CountedTier
from kvdb.storage.tier import Blocks
from kvdb.types import Addresses, TierStats


class PagedTier(CountedTier):
    """A `Tier` of virtual memory: a block takes physical memory from when it is filled until it is discarded. Thread-safe.

    Indexes and plans keep addresses, so what leaves memory and comes back does so at the same place, as in vmcache (Leis et al.,
    SIGMOD 2023). Each allocation is an arena of its own. The tier counts nothing in the budget; who fills its blocks does
    (`kvdb.storage.buffer_pool`).
    """

    name = "paged"

    def __init__(self, block_nbytes: int, budget: CpuBudget) -> None:
        super().__init__(budget.lock)
        self.block_nbytes = block_nbytes
        self._arenas: dict[int, Arena] = {}  # by the first block of their extent
        self._addresses: Addresses = np.zeros(0, np.uint64)  # of each physical block
        self._filled: set[int] = set()  # the extents that take physical memory

    def allocate(self, count: int, *, evict: bool = False) -> Blocks:  # noqa: ARG002
        with self._lock:
            try:
                arena = Arena(count * self.block_nbytes)
            except OSError as error:
                raise CapacityError(f"the system gives no {count * self.block_nbytes:,} addresses: {error.strerror}") from None
            assert not self._ledger.free, "an extent is taken and released as a whole"
            first = self._ledger.add(count)
            self._arenas[first] = arena
            more = first + count - len(self._addresses)
            if more > 0:
                self._addresses = np.concatenate([self._addresses, np.zeros(more, np.uint64)])
            slots = np.arange(count, dtype=np.uint64) * np.uint64(self.block_nbytes)
            self._addresses[first : first + count] = slots + np.uint64(arena.address)
            return self._take(count)

    def addresses(self, blocks: Blocks) -> Addresses:
        return self._addresses[blocks]

    def fill(self, blocks: Blocks) -> None:
        """Count the blocks of one allocation as filled, because they are about to be."""
        with self._lock:
            self._filled.add(int(blocks[0]))

    def discard(self, blocks: Blocks) -> None:
        """Give the physical memory of one allocation back to the system. Nobody may be reading or writing it."""
        with self._lock:
            self._filled.discard(int(blocks[0]))
            self._arenas[int(blocks[0])].discard()

    def stats(self) -> TierStats:
        with self._lock:
            arenas = [self._arenas[first] for first in self._filled]
            return TierStats(
                name=self.name,
                blocks_used=sum(arena.nbytes for arena in arenas) // self.block_nbytes,
                blocks_total=self._ledger.total,
                block_nbytes=self.block_nbytes,
                nbytes=sum(arena.nbytes for arena in arenas),
                huge=all(arena.huge is not False for arena in arenas),
            )

    def close(self) -> None:
        with self._lock:
            for arena in self._arenas.values():
                arena.close()
            self._arenas = {}

    def _emptied(self, extent: int) -> None:
        arena = self._arenas.pop(extent, None)
        if arena is not None:  # it is gone with a tier that was closed
            self._filled.discard(extent)
            self._ledger.remove(extent)
            arena.close()
