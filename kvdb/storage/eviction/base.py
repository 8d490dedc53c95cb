"""What every eviction policy does: it counts bytes and pins, and its kind says which entry goes next."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """Which entry of a tier is least worth its room. Pure: it holds keys and sizes, and neither clock nor lock.

    The capacity is its owner's: whoever wants room calls `evict` until there is enough. What is pinned is never evicted. A kind
    adds what it does with an entry that comes (`_enter`), is used (`_use`), leaves (`_leave`), and which goes next (`_choose`).
    nbytes: of all entries together.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._sizes: dict[K, int] = {}
        self._pins: Counter[K] = Counter()

    def __contains__(self, key: K) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def touch(self, key: K, nbytes: int) -> None:
        """The entry came, or was used again. nbytes: its size from now on. Of a path through a tree, touch what lies deepest
        first, so that it goes before what it hangs at."""
        if key in self._sizes:
            self.nbytes += nbytes - self._sizes[key]
            self._sizes[key] = nbytes
            self._use(key)
        else:
            self.nbytes += nbytes
            self._sizes[key] = nbytes
            self._enter(key)

    def evict(self) -> K | None:
        """The entry that is least worth its room, which is no entry from now on; None where every one is pinned."""
        if len(self._pins) == len(self._sizes):
            return None
        key = self._choose()
        self.nbytes -= self._sizes.pop(key)
        return key

    def forget(self, key: K) -> None:
        """The entry left for another reason, whatever pins it. One that is not here is no error."""
        if key in self._sizes:
            self._leave(key)
            self.nbytes -= self._sizes.pop(key)
            del self._pins[key]

    def pin(self, key: K) -> None:
        """Keep an entry until it was unpinned as often as pinned."""
        assert key in self._sizes, "what is not here was pinned"
        self._pins[key] += 1

    def unpin(self, key: K) -> None:
        """Undo one `pin`. An entry that was forgotten meanwhile is no error."""
        if key in self._pins:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def pinned(self, key: K) -> bool:
        return key in self._pins

    def size(self, key: K) -> int:
        """The bytes of an entry."""
        return self._sizes[key]

    @abstractmethod
    def _enter(self, key: K) -> None:
        """An entry came."""

    @abstractmethod
    def _use(self, key: K) -> None:
        """An entry was used."""

    @abstractmethod
    def _leave(self, key: K) -> None:
        """An entry is evicted no more, because it is gone."""

    @abstractmethod
    def _choose(self) -> K:
        """Take the next entry out of the order; at least one is not pinned."""
