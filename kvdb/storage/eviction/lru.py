"""Least recently used."""

from collections import OrderedDict

from kvdb.storage.eviction.base import EvictionPolicy, K


class Lru(EvictionPolicy[K]):
    """What was used longest ago goes first."""

    def __init__(self) -> None:
        super().__init__()
        self._order: OrderedDict[K, None] = OrderedDict()

    def _enter(self, key: K) -> None:
        self._order[key] = None

    def _use(self, key: K) -> None:
        self._order.move_to_end(key)

    def _leave(self, key: K) -> None:
        del self._order[key]

    def _choose(self) -> K:
        key = next(key for key in self._order if not self.pinned(key))
        del self._order[key]
        return key
