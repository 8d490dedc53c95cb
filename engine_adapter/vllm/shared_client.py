"""One client for both roles of a connector where they live in one process, because a folder is open only once."""

from pathlib import Path
from threading import Lock

import kvdb
from kvdb.client.connect import REMOTE

_LOCK = Lock()
_OPEN: dict[str, tuple[kvdb.Client, int]] = {}
"""The clients of this process by their targets, and how many hold each."""


def acquire(target: str) -> kvdb.Client:
    """The process's client for a target, to be given back with `release`. Raises what `kvdb.connect` raises."""
    key = _key(target)
    with _LOCK:
        client, holders = _OPEN.get(key) or (kvdb.connect(target), 0)
        _OPEN[key] = client, holders + 1
        return client


def release(target: str) -> None:
    """Close the client for a target once nobody holds it."""
    key = _key(target)
    with _LOCK:
        client, holders = _OPEN.pop(key)
        if holders > 1:
            _OPEN[key] = client, holders - 1
            return
    client.close()


def _key(target: str) -> str:
    return target if target.startswith(REMOTE) else str(Path(target).absolute())
