"""How long a context is to be kept, what is noted of it, and how it was used."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Self

from kvdb.types import ContextUpdate, Retention


@dataclass(slots=True)
class Life:
    """What changes of a context while it is stored; its catalogue changes it, with its lock held. Times are seconds since the
    epoch.

    pinned: whether it stays whatever room is asked for. expires: when it is dropped, None for never. metadata: what its owner
    noted of it, as in JSON. created: when it was stored. used: when tokens of it were last reused, or it was stored. uses: how
    often tokens of it were reused. shared_with: the tenants of a server, beside its own, that may read it.
    """

    pinned: bool = False
    expires: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    used: float = 0.0
    uses: int = 0
    shared_with: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.used = self.used or self.created

    @classmethod
    def begun(cls, retention: Retention) -> Self:
        """The life of a context that is stored now."""
        return cls(expires=_expires(retention.ttl), metadata=dict(retention.metadata or {}), pinned=retention.pinned)

    def note_use(self) -> None:
        """Count one use, now."""
        self.used = time.time()
        self.uses += 1

    def changed(self, change: ContextUpdate) -> Self:
        """The life that it is after that change; this one stays as it is."""
        life = replace(self)
        if change.pinned is not None:
            life.pinned = change.pinned
        if change.ttl is not None:
            life.expires = _expires(change.ttl)
        if change.metadata is not None:
            life.metadata = dict(change.metadata)
        if change.shared_with is not None:
            life.shared_with = change.shared_with
        return life


def _expires(ttl: float | None) -> float | None:
    """When a context is dropped whose time to live is that many seconds from now, None or infinite for never."""
    return None if ttl is None or ttl == inf else time.time() + ttl
