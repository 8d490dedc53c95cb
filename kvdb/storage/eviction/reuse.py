"""Recency, put off by how often an entry was used again."""

from heapq import heapify, heappop, heappush
from math import sqrt
from typing import Generic

from kvdb.storage.eviction.base import EvictionPolicy, K

TURNOVER = 0.35
"""How much longer an entry stays that was used again once, in times that all entries are replaced; with the square root of the
uses. Chosen on the conversations of Mooncake's trace (docs/decisions/020), where the hit rates are flat around it."""
USES_MAX = 16
GHOSTS = 4
"""What left is remembered until four times as many bytes left after it."""


class Reuse(EvictionPolicy[K]):
    """LRU, but what was used again stays as if it had been used later: those who continue a conversation are likelier to
    continue it once more.

    The clock counts the bytes that came. An entry is due at the time of its last use, and the bytes of all entries times TURNOVER
    times the square root of its uses behind that; the first that is due goes first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[K, int] = {}  # of entries and of ghosts, but for those used once
        self._due: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], K]] = []  # one that is not what `_due` says is of before
        self._ghosts: Ghosts[K] = Ghosts()
        self._clock = self._touches = 0

    def _enter(self, key: K) -> None:
        self._clock += self.size(key)
        if key in self._ghosts:
            self._ghosts.discard(key)
            self._count(key)
        self._put_off(key)

    def _use(self, key: K) -> None:
        self._count(key)
        self._put_off(key)

    def _leave(self, key: K) -> None:
        del self._due[key]
        self._uses.pop(key, None)
        self._trim(0)  # lest what left be kept alive by the heap

    def _choose(self) -> K:
        pinned = []
        while True:
            due, key = heappop(self._heap)
            if self._due.get(key) == due:
                if not self.pinned(key):
                    break
                pinned.append((due, key))
        for entry in pinned:
            heappush(self._heap, entry)
        del self._due[key]
        self._ghosts.add(key, self.size(key))
        for forgotten in self._ghosts.trim(GHOSTS * self.nbytes):
            self._uses.pop(forgotten, None)
        return key

    def _count(self, key: K) -> None:
        self._uses[key] = min(self._uses.get(key, 0) + 1, USES_MAX)

    def _put_off(self, key: K) -> None:
        self._touches += 1  # a tie goes to what was touched first
        due = self._clock + TURNOVER * self.nbytes * sqrt(self._uses.get(key, 0)), self._touches
        self._due[key] = due
        heappush(self._heap, (due, key))
        self._trim(64)

    def _trim(self, spare: int) -> None:
        """Take what is of before out of the heap, where it is most of it but for so many."""
        if len(self._heap) > 2 * len(self._due) + spare:
            self._heap = [(due, key) for key, due in self._due.items()]
            heapify(self._heap)


class Ghosts(Generic[K]):
    """The keys and sizes of entries that were evicted, the last of them, in the order in which they were. nbytes: of all."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._sizes: dict[K, int] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._sizes

    def add(self, key: K, nbytes: int) -> None:
        self.discard(key)
        self._sizes[key] = nbytes
        self.nbytes += nbytes

    def discard(self, key: K) -> None:
        self.nbytes -= self._sizes.pop(key, 0)

    def trim(self, nbytes: float) -> list[K]:
        """Forget the oldest until they are at most `nbytes` bytes. Returns those."""
        forgotten = []
        while self._sizes and self.nbytes > nbytes:
            forgotten.append(next(iter(self._sizes)))
            self.discard(forgotten[-1])
        return forgotten
