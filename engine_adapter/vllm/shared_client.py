"""One client for both roles of a connector where they live in one process, because a folder is open only once."""

from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import kvdb
from engine_adapter.vllm.presence import Presence
from kvdb.client.connect import REMOTE

_LOCK = Lock()


@dataclass
class _Open:
    client: kvdb.Client
    presence: Presence = field(default_factory=Presence)
    holders: int = 0


_OPEN: dict[str, _Open] = {}
"""The clients of this process by their targets."""


def acquire(target: str) -> tuple[kvdb.Client, Presence]:
    """The process's client for a target, to be given back with `release`, and what it knows of whether its database is there.
    Raises what `kvdb.connect` raises."""
    key = _key(target)
    with _LOCK:
        found = _OPEN.get(key) or _Open(kvdb.connect(target))
        found.holders += 1
        _OPEN[key] = found
        return found.client, found.presence


def release(target: str) -> None:
    """Close the client for a target once nobody holds it."""
    key = _key(target)
    with _LOCK:
        found = _OPEN[key]
        found.holders -= 1
        if found.holders:
            return
        del _OPEN[key]
    found.client.close()


def _key(target: str) -> str:
    return target if target.startswith(REMOTE) else str(Path(target).absolute())
