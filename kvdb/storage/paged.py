"""Blocks of main memory whose contents come and go while their addresses stay."""

import numpy as np

import kvdb._native as _native
from indexes.arena import Arena
from kvdb.errors import CapacityError
from kvdb.storage.budget import CpuBudget
from kvdb.storage.direct_io import PAGE
from kvdb.storage.slots import CountedTier
from kvdb.storage.tier import Blocks
from kvdb.types import Addresses, TierStats


class PagedTier(CountedTier):
    """A `Tier` of virtual memory, whose pages take physical memory from when they are read until they go. Thread-safe.

    Indexes and plans keep addresses, so what leaves memory and comes back does so at the same place, as in vmcache (Leis et al.,
    SIGMOD 2023). Each allocation is an arena of its own, of plain pages. The tier counts nothing in the budget; who has pages
    read does (`kvdb.storage.buffer_pool`).
    """

    name = "paged"

    def __init__(self, block_nbytes: int, budget: CpuBudget) -> None:
        super().__init__(budget.lock)
        self.block_nbytes = block_nbytes
        self._arenas: dict[int, Arena] = {}  # by the first block of their extent
        self._addresses: Addresses = np.zeros(0, np.uint64)  # of each physical block
        self._pages: dict[int, _native.LayerPages] = {}  # by the same

    def allocate(self, count: int, *, evict: bool = False) -> Blocks:  # noqa: ARG002
        with self._lock:
            try:
                arena = Arena(-(-count * self.block_nbytes // PAGE) * PAGE, plain=True)
            except OSError as error:
                raise CapacityError(f"the system gives no {count * self.block_nbytes:,} addresses: {error.strerror}") from None
            assert not self._slots.free, "an extent is taken and released as a whole"
            first = self._slots.add(count)
            self._arenas[first] = arena
            more = first + count - len(self._addresses)
            if more > 0:
                self._addresses = np.concatenate([self._addresses, np.zeros(more, np.uint64)])
            slots = np.arange(count, dtype=np.uint64) * np.uint64(self.block_nbytes)
            self._addresses[first : first + count] = slots + np.uint64(arena.address)
            return self._take(count)

    def addresses(self, blocks: Blocks) -> Addresses:
        return self._addresses[blocks]

    def hold(self, blocks: Blocks, pages: _native.LayerPages) -> None:
        """Keep the pages of one allocation, which come and go until its blocks are released or the tier is closed."""
        with self._lock:
            self._pages[int(blocks[0])] = pages

    def stats(self) -> TierStats:
        with self._lock:
            nbytes = sum(pages.nbytes for pages in self._pages.values())
            used = nbytes // self.block_nbytes
            return TierStats(self.name, used, self._slots.total, self.block_nbytes, nbytes, huge=not self._arenas)

    def close(self) -> None:
        with self._lock:
            for extent in list(self._arenas):
                self._close(extent)

    def _emptied(self, extent: int) -> None:
        if extent in self._arenas:  # else it is gone with a tier that was closed
            self._slots.remove(extent)
            self._close(extent)

    def _close(self, extent: int) -> None:
        pages = self._pages.pop(extent, None)
        if pages is not None:
            pages.leave()
        self._arenas.pop(extent).close()
