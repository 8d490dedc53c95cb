"""How a database is used at the moment, embedded or as one tenant of a server sees it."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from kvdb.errors import NotFound
from kvdb.types import ContextInfo, DatabaseStatus, IndexInfo
from kvdb.version import __version__

UNDER_WAY = ("building", "waiting")
"""The states of indexes that are not there yet."""


class Stored(Protocol):
    """What is stored, with its indexes."""

    def contexts(self) -> Sequence[ContextInfo]: ...

    def indexes(self, name: str) -> Sequence[IndexInfo]: ...


def database_status(stored: Stored, sessions: int, uptime_seconds: float) -> DatabaseStatus:
    """sessions: how many are open."""
    found: dict[tuple[int, str], str] = {}
    contexts = stored.contexts()
    for context in contexts:
        with suppress(NotFound):  # it was dropped meanwhile
            found.update(((index.segment, index.kind), index.state) for index in stored.indexes(context.name))
    there = Counter(kind for (_, kind), state in found.items() if state not in (*UNDER_WAY, "failed"))
    building = sum(state in UNDER_WAY for state in found.values())
    return DatabaseStatus(__version__, uptime_seconds, len(contexts), sessions, dict(sorted(there.items())), building)
