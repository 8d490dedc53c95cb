"""The budget of main memory."""

from collections.abc import Callable
from threading import RLock

from kvdb.errors import CapacityError
from kvdb.storage.room import Evict, with_room

FREE_BYTES, FREE_SHARE = 32 << 20, 40
"""The part for what stands beside blocks, of the 64 MiB and the twentieth that a process may take beyond its budget."""


class CpuBudget:
    """Bytes of main memory that the CPU tiers of one database, and what is stored beside their blocks, take together.

    limit: None for no limit. lock: the lock of every tier under it, because a tier that lacks room takes back what others spare.
    Bytes beside blocks, such as tables, ids and plans, count only above FREE_BYTES plus 1 / FREE_SHARE of the limit. evict: has
    contexts go to make room, None where none may. offload: the same where nothing is lost by it, because it goes to disk.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.lock = RLock()
        self._taken = 0
        self._beside = 0
        self._free_beside = 0 if limit is None else FREE_BYTES + limit // FREE_SHARE
        self._trims: list[Callable[[int], None]] = []
        self.evict: Evict | None = None
        self.offload: Evict | None = None

    def register(self, trim: Callable[[int], None], *, first: bool = False) -> None:
        """trim: releases what its owner holds of the budget but does not use, called with the lock held; where it could be of use
        again, only as many bytes as it is told are missing. first: before all that are registered, because it gives blocks back
        to tiers."""
        with self.lock:
            self._trims.insert(0 if first else len(self._trims), trim)

    @property
    def left(self) -> int | None:
        """Bytes that may still be taken; None for any number."""
        return None if self.limit is None else self.limit - self._taken

    def check(self, nbytes: int) -> None:
        """Raises CapacityError unless `nbytes` more fit, if necessary after all owners have released what they do not use."""
        with self.lock:
            if self.limit is None or self._taken + nbytes <= self.limit:
                return
            if nbytes > self.limit:
                raise CapacityError(
                    f"the CPU tier needs {nbytes:,} bytes at once, more than all of storage.cpu_bytes_max={self.limit}; raise "
                    "the budget"
                )
            for trim in self._trims:
                trim(self._taken + nbytes - self.limit)
            if self._taken + nbytes > self.limit:
                raise CapacityError(
                    f"the CPU tier needs {nbytes:,} bytes more and holds {self._taken:,} of storage.cpu_bytes_max={self.limit}; "
                    "drop contexts, close sessions or raise the budget"
                )

    def take(self, nbytes: int) -> None:
        """Raises CapacityError as `check` does, and then takes nothing."""
        with self.lock:
            self.check(nbytes)
            self._taken += nbytes

    def give(self, nbytes: int) -> None:
        with self.lock:
            self._taken -= nbytes

    def take_beside(self, nbytes: int) -> None:
        """Take bytes beside blocks, for which contexts may go as in `with_room`. Raises CapacityError as `check` does, and then
        takes nothing."""
        with_room(lambda: self._take_beside(nbytes), self.evict, nbytes)

    def take_for_index(self, nbytes: int) -> None:
        """Take bytes beside blocks for an index, which can be built again: segments go to disk for it, and no context is dropped.
        Raises CapacityError as `check` does, and then takes nothing."""
        with_room(lambda: self._take_beside(nbytes), self.offload, nbytes)

    def give_beside(self, nbytes: int) -> None:
        with self.lock:
            self.give(self._counted(self._beside) - self._counted(self._beside - nbytes))
            self._beside -= nbytes

    def _take_beside(self, nbytes: int) -> None:
        with self.lock:
            self.take(self._counted(self._beside + nbytes) - self._counted(self._beside))
            self._beside += nbytes

    def _counted(self, beside: int) -> int:
        """The number of bytes beside blocks that count in the budget."""
        return max(0, beside - self._free_beside)


class Reservation:
    """Bytes beside blocks that one owner has taken of a budget, until `release`. Not thread-safe."""

    def __init__(self, budget: CpuBudget, nbytes: int = 0) -> None:
        """Raises CapacityError."""
        budget.take_beside(nbytes)
        self._budget = budget
        self.nbytes = nbytes

    def resize(self, nbytes: int) -> None:
        """Hold `nbytes` bytes from now on. Raises CapacityError, and then holds as many as before."""
        more = nbytes - self.nbytes
        if more > 0:
            self._budget.take_beside(more)
        else:
            self._budget.give_beside(-more)
        self.nbytes = nbytes

    def release(self) -> None:
        """Give everything back. Releasing twice does nothing."""
        self.resize(0)
