"""The policies by their names in `storage.eviction`."""

from typing import Any

from kvdb.config.storage import EVICTIONS
from kvdb.storage.eviction.base import EvictionPolicy
from kvdb.storage.eviction.lru import Lru
from kvdb.storage.eviction.reuse import Reuse

_KINDS: dict[str, type[EvictionPolicy[Any]]] = {"reuse": Reuse, "lru": Lru}
assert {*_KINDS, "none"} == set(EVICTIONS)


def policy(name: str) -> EvictionPolicy[Any] | None:
    """An empty policy of that name; None for "none"."""
    return None if name == "none" else _KINDS[name]()
