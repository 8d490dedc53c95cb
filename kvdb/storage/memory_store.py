"""The store that lies in memory, and the shortest to read: bytes in a dictionary, which end with it.

It keeps the promises of `kvdb.storage.segment_store` with nothing of a file system, so that whatever stands on a store can be
tried without a folder (`make test-memory-store`). It counts in no budget and is no tier of a database.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import numpy as np

import kvdb.storage.direct_io as direct_io
from kvdb.errors import AlreadyExists
from kvdb.storage.segment_store import SegmentStore, unreadable
from kvdb.types import Addresses


class MemoryStore(SegmentStore):
    """Objects in memory; see `SegmentStore`. objects, marks: those that are finished, and their marks, by key."""

    def __init__(self, id: str) -> None:  # noqa: A002  # the protocol's name
        self.id = id
        self.where = f"memory:{id}"
        self.objects: dict[str, bytes | bytearray] = {}
        self.marks: dict[str, str] = {}
        self._unfinished: dict[str, int] = {}
        self._lock = Lock()

    def begin(self, key: str, nbytes: int, *, whole_pages: bool) -> "MemoryWriter":  # noqa: ARG002  # memory has no pages
        with self._lock:
            if key in self.objects or key in self._unfinished:
                raise AlreadyExists(f"{self.where}/{key} is there already, and is never written over")
            self._unfinished[key] = nbytes
        return MemoryWriter(self, key, nbytes)

    @contextmanager
    def open(self, key: str, *, whole_pages: bool) -> "Iterator[MemoryReader]":  # noqa: ARG002  # memory has no pages
        content = self.objects.get(key)
        if content is None:
            raise unreadable(f"{self.where}/{key}", "it is gone")
        yield MemoryReader(content)

    def put(self, key: str, content: bytes) -> None:
        self.objects[key] = content

    def get(self, key: str) -> bytes | None:
        content = self.objects.get(key)
        return None if content is None else bytes(content)

    def remove(self, key: str) -> None:
        with self._lock:
            self.objects.pop(key, None)
            self.marks.pop(key, None)

    def list(self) -> dict[str, int]:
        with self._lock:
            begun = {f".{key}": nbytes for key, nbytes in self._unfinished.items()}
            return begun | {key: len(content) for key, content in self.objects.items()}

    def sync(self) -> None:
        """Nothing outlives the process."""

    def close(self) -> None:
        """Nothing is held but memory, which goes with the last who holds the store."""

    def mark(self, key: str, text: str) -> None:
        with self._lock:
            self.marks.pop(key, None)
            if text and key in self.objects:
                self.marks[key] = text

    def marked(self, key: str) -> str:
        return self.marks.get(key, "")

    def take(self, key: str, content: bytearray | None, mark: str = "") -> None:
        """End the writing of an object. content: None where it was given up."""
        with self._lock:
            self._unfinished.pop(key, None)
            if content is not None:
                self.objects[key] = content
        self.mark(key, mark)


class MemoryReader:
    """See `ObjectReader`."""

    def __init__(self, content: bytes | bytearray) -> None:
        self.nbytes = len(content)
        self._content = np.frombuffer(content, np.uint8)

    def read(self, at: int, addresses: Addresses, nbytes: int) -> int:
        start = at
        for buffer in direct_io.buffers(addresses, nbytes):
            piece = self._content[at : at + len(buffer)]
            ctypes.memmove(buffer, piece.ctypes.data, len(piece))  # without the GIL
            at += len(piece)
        return at - start

    def read_bytes(self, at: int, nbytes: int) -> bytes:
        return self._content[at : at + nbytes].tobytes()


class MemoryWriter:
    """See `ObjectWriter`."""

    def __init__(self, store: MemoryStore, key: str, nbytes: int) -> None:
        self._store = store
        self._key = key
        self._content: bytearray | None = bytearray(nbytes)

    def write(self, at: int, addresses: Addresses, nbytes: int) -> None:
        assert self._content is not None
        into = np.frombuffer(self._content, np.uint8).ctypes.data + at
        for buffer in direct_io.buffers(addresses, nbytes):
            ctypes.memmove(into, buffer, len(buffer))
            into += len(buffer)

    def finish(self, mark: str, *, synced: bool) -> None:  # noqa: ARG002  # nothing outlives the process
        self._store.take(self._key, self._content, mark)
        self._content = None

    def abandon(self) -> None:
        if self._content is not None:
            self._content = None
            self._store.take(self._key, None)
