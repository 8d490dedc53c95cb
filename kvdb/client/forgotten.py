"""Sessions that a program forgot to close: when their handle is collected as garbage, a thread closes them.

The collector may run in any thread and in the middle of anything, also while a lock is held that closing takes. So a session
is only put into a queue there, and closed by a thread that holds nothing.
"""

from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Protocol
from weakref import finalize

from kvdb.errors import KvdbError


class Closable(Protocol):
    """What is closed in the end, twice without harm."""

    def close(self) -> None: ...


class Closer:
    """One thread, which is started when there is first something to look after. Thread-safe."""

    def __init__(self) -> None:
        self._forgotten: SimpleQueue[Closable] = SimpleQueue()  # whose `put` may interrupt itself
        self._lock = Lock()
        self._thread: Thread | None = None

    def close_with(self, handle: object, closable: Closable) -> "finalize[[Closable], object]":
        """Close it when nobody holds the handle any more. Call `detach` of what is returned once it is closed."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # as in the child of a fork
                self._thread = Thread(target=self._run, name="kvdb-client-closer", daemon=True)
                self._thread.start()
        finalizer = finalize(handle, self._forgotten.put, closable)
        finalizer.atexit = False
        return finalizer

    def _run(self) -> None:
        while True:
            forgotten = self._forgotten.get()
            with suppress(KvdbError):  # the server, or the database, has gone first
                forgotten.close()
            del forgotten


CLOSER = Closer()
