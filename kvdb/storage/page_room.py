"""The part of the budget of main memory that the pages of paged segments may take."""

import kvdb._native as _native
from kvdb.errors import CapacityError
from kvdb.storage.budget import CpuBudget
from kvdb.storage.paged_segment import PagedSegment


class PageRoom:
    """What the pages of a pool may take. All methods are called with the lock of the budget held.

    reserved: the bytes that nobody else may take, at least one layer of each open segment. taken: the bytes that were taken of
    the budget, the limit of the pages. taking: whether the budget is being asked for more, so that the pool gives none back.
    """

    def __init__(self, budget: CpuBudget, pages: _native.PagePool) -> None:
        self.budget = budget
        self._pages = pages
        self.reserved = self.taken = 0
        self.taking = False

    def shortage(self, nbytes: int) -> int:
        """How many bytes are missing for `nbytes` more, where pages only go from the pool itself."""
        more = max(self.reserved, self._pages.nbytes + nbytes) - self.taken
        if more <= 0 or self.budget.left is None:
            return 0
        self.taking = True
        try:
            self.budget.check(more)
        except CapacityError:
            return more - self.budget.left
        finally:
            self.taking = False
        return 0

    def reserve(self, segment: PagedSegment, nbytes: int) -> None:
        """Set how much is reserved for a segment. Raises CapacityError, and then it is as before."""
        before = segment.reserved
        self.reserved += nbytes - before
        segment.reserved = nbytes
        try:
            self.settle()
        except CapacityError:
            self.reserved -= nbytes - before
            segment.reserved = before
            raise

    def settle(self, more: int = 0) -> None:
        """Take of the budget what is reserved, or filled with `more` bytes, and give back the rest. Raises CapacityError."""
        limit = max(self.reserved, self._pages.nbytes + more)
        if limit > self.taken:
            self._take(limit - self.taken)
        limit = self._pages.set_limit(limit)  # searches may have brought some meanwhile
        self.budget.give(self.taken - limit)
        self.taken = limit

    def spread(self, nbytes: int) -> None:
        """Let pages take `nbytes` more, as far as they are free."""
        more = self._pages.nbytes + nbytes - self.taken
        if self.budget.left is not None:
            more = min(more, self.budget.left)
        if more > 0:
            self._take(more)
            self._pages.set_limit(self.taken)

    def _take(self, nbytes: int) -> None:
        self.taking = True
        try:
            self.budget.take(nbytes)
        finally:
            self.taking = False
        self.taken += nbytes
