"""Databases whose segments lie in memory: `KVDB_TEST_STORE=memory`, or `make test-memory-store`, runs the suite so.

Catalogue, label and locks stay in the folder of a store; its segments, and what is kept beside them, lie in a `MemoryStore` for
as long as this process lives, where whoever opens the store again finds them by its id. Tests that are marked `needs_folder` look
at files of segments, copy them, or have another process use them; they are left out.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest

import kvdb.storage.store as block_store
from kvdb.storage.home import Home
from kvdb.storage.memory_store import MemoryStore

ASKED = os.environ.get("KVDB_TEST_STORE") == "memory"


class KeptStore(MemoryStore):
    """The segments of a database, until its folder is gone."""

    known: ClassVar[dict[str, "KeptStore"]] = {}
    home: Home

    @classmethod
    def of(cls, home: Home) -> "KeptStore":
        store = cls.known.setdefault(home.key, cls(home.key))
        store.home = home
        return store

    def close(self) -> None:
        self.home.close()
        if not self.home.path.exists():
            self.known.pop(self.id, None)


@contextmanager
def in_memory() -> Iterator[None]:
    """The segments of databases that are opened while the body runs lie in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_store, "SegmentFolder", KeptStore.of)
        yield
