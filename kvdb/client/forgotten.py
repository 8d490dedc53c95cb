"""Sessions that a program forgot to close: when their handle is collected as garbage, a thread closes them.

The collector may run in any thread and in the middle of anything, also while a lock is held that closing takes. So a session
is only put into a queue there, and closed by a thread that holds nothing.
"""

import atexit
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Protocol
from weakref import finalize

import kvdb.forks as forks
from kvdb.errors import KvdbError

END_SECONDS_MAX = 1.0
"""How long the end of a process waits for a session that is being closed."""


class Closable(Protocol):
    """An object that can be closed, more than once without harm."""

    def close(self) -> None: ...


class Closer:
    """Closes forgotten sessions in one thread, which is started with the first session. Thread-safe."""

    _thread: Thread | None

    def __init__(self) -> None:
        self._begin()
        forks.in_child(self, Closer._begin)

    def close_with(self, handle: object, closable: Closable) -> "finalize[[Closable], object]":
        """Close the session when nobody holds the handle any more. Call `detach` of the result once it is closed otherwise."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # one that could not be closed has ended it
                self._thread = Thread(target=self._run, name="kvdb-client-closer", daemon=True)
                self._thread.start()
        finalizer = finalize(handle, self._forgotten.put, closable)
        finalizer.atexit = False
        return finalizer

    def end(self) -> None:
        """Wait until the session that is being closed is closed, at most END_SECONDS_MAX. The others end with the process. A
        thread that was stopped in the middle would keep what it holds beyond the interpreter's end."""
        with self._lock:
            thread, self._thread, self._ending = self._thread, None, True
        if thread is not None:
            self._forgotten.put(None)
            thread.join(END_SECONDS_MAX)

    def _begin(self) -> None:
        self._forgotten: SimpleQueue[Closable | None] = SimpleQueue()  # whose `put` may interrupt itself; None ends the thread
        self._lock = Lock()
        self._thread = None
        self._ending = False

    def _run(self) -> None:
        while (forgotten := self._forgotten.get()) is not None:
            if not self._ending:
                with suppress(KvdbError):  # the server, or the database, has gone first
                    forgotten.close()
            del forgotten


CLOSER = Closer()
atexit.register(CLOSER.end)
