"""S3-FIFO: Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023; in bytes, so that sizes may differ."""

from collections import OrderedDict

from kvdb.storage.eviction.base import EvictionPolicy, Ghosts, K

SMALL_SHARE = 0.1
"""The part of all bytes that the small queue should have, as in the paper."""
USES_MAX = 3


class S3Fifo(EvictionPolicy[K]):
    """New entries wait in a small queue, and those used while they do go on to the main one; the others leave soon, and go to the
    main one if they come back. An entry of the main queue gets another round for each use, up to USES_MAX.

    Both queues hold how often each entry was used since it came or had its last round.
    """

    def __init__(self) -> None:
        super().__init__()
        self._small: OrderedDict[K, int] = OrderedDict()
        self._main: OrderedDict[K, int] = OrderedDict()
        self._small_nbytes = 0
        self._ghosts: Ghosts[K] = Ghosts()

    def touch(self, key: K, nbytes: int) -> None:
        if key in self._small:
            self._small_nbytes += nbytes - self.size(key)
        super().touch(key, nbytes)

    def _enter(self, key: K) -> None:
        if key in self._ghosts:
            self._ghosts.discard(key)
            self._main[key] = 0
        else:
            self._small[key] = 0
            self._small_nbytes += self.size(key)

    def _use(self, key: K) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, USES_MAX)

    def _leave(self, key: K) -> None:
        if key in self._small:
            del self._small[key]
            self._small_nbytes -= self.size(key)
        else:
            del self._main[key]

    def _choose(self) -> K:
        while True:
            main = any(not self.pinned(key) for key in self._main)
            if self._small and (self._small_nbytes > SMALL_SHARE * self.nbytes or not main):
                key, uses = next(iter(self._small.items()))
                self._leave(key)
                if not uses and not self.pinned(key):
                    self._ghosts.add(key, self.size(key))
                    self._ghosts.trim(self.nbytes - self._small_nbytes)
                    return key
                self._main[key] = 0
            else:
                key, uses = self._main.popitem(last=False)
                if not uses and not self.pinned(key):
                    return key
                self._main[key] = max(uses - 1, 0)
