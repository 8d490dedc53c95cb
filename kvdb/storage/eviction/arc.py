"""ARC: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003; in bytes, so that sizes may differ."""

from collections import OrderedDict

from kvdb.storage.eviction.base import EvictionPolicy, Ghosts, K


class Arc(EvictionPolicy[K]):
    """Entries that were used once and those that were used again, each in the order of their use; what comes back soon after it
    was evicted says which of the two deserves more room.

    _target: the bytes that those used once should have (`p` in the paper, whose T1, T2, B1 and B2 are `_once`, `_again`, and
    their ghosts). The paper's capacity is what all entries take.
    """

    def __init__(self) -> None:
        super().__init__()
        self._once: OrderedDict[K, None] = OrderedDict()
        self._again: OrderedDict[K, None] = OrderedDict()
        self._once_nbytes = 0
        self._once_ghosts: Ghosts[K] = Ghosts()
        self._again_ghosts: Ghosts[K] = Ghosts()
        self._target = 0.0

    def touch(self, key: K, nbytes: int) -> None:
        if key in self._once:
            self._once_nbytes += nbytes - self.size(key)
        super().touch(key, nbytes)

    def _enter(self, key: K) -> None:
        mine, others = self._once_ghosts, self._again_ghosts
        if key in mine:
            self._target += self.size(key) * max(1.0, others.nbytes / max(mine.nbytes, 1))
        elif key in others:
            self._target -= self.size(key) * max(1.0, mine.nbytes / max(others.nbytes, 1))
        else:
            self._once[key] = None
            self._once_nbytes += self.size(key)
            return
        self._target = min(max(self._target, 0.0), float(self.nbytes))
        mine.discard(key)
        others.discard(key)
        self._again[key] = None

    def _use(self, key: K) -> None:
        if key in self._once:
            del self._once[key]
            self._once_nbytes -= self.size(key)
            self._again[key] = None
        else:
            self._again.move_to_end(key)

    def _leave(self, key: K) -> None:
        if key in self._once:
            del self._once[key]
            self._once_nbytes -= self.size(key)
        else:
            del self._again[key]

    def _choose(self) -> K:
        capacity = self.nbytes
        once, again = self._first_of(self._once), self._first_of(self._again)
        if once is not None and (self._once_nbytes > self._target or again is None):
            key, ghosts = once, self._once_ghosts
        else:
            assert again is not None
            key, ghosts = again, self._again_ghosts
        self._leave(key)
        ghosts.add(key, self.size(key))
        self._once_ghosts.trim(capacity - self._once_nbytes)
        self._again_ghosts.trim(capacity - self._once_ghosts.nbytes)
        return key

    def _first_of(self, order: OrderedDict[K, None]) -> K | None:
        return next((key for key in order if not self.pinned(key)), None)
