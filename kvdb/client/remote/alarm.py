"""Ends calls of a stream that take too long, for gRPC has a deadline for a whole stream only."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Protocol


class Expiring(Protocol):
    """A call that can be ended from another thread."""

    def expire(self) -> None: ...


class Alarm:
    """One thread, which is there while calls are watched and a while longer. Thread-safe."""

    def __init__(self) -> None:
        self._due: dict[Expiring, float] = {}
        self._wakes = inf
        """When the thread looks again; infinite while it looks, so that whoever comes tells it."""
        self._changed = Condition(Lock())
        self._thread: Thread | None = None

    @contextmanager
    def within(self, call: Expiring, seconds: float) -> Iterator[None]:
        """Expire the call unless the body ends in so many seconds."""
        self.begin(call, seconds)
        try:
            yield
        finally:
            self.end(call)

    def begin(self, call: Expiring, seconds: float) -> None:
        """Expire the call unless `end` comes in so many seconds."""
        due = monotonic() + seconds
        self._due[call] = due
        if due < self._wakes:  # seldom: most calls have as many seconds as the one before
            with self._changed:
                if self._thread is None:
                    self._thread = Thread(target=self._run, name="kvdb-client-alarm", daemon=True)
                    self._thread.start()
                self._changed.notify()

    def end(self, call: Expiring) -> None:
        """The call is over in time."""
        self._due.pop(call, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._wakes = inf
                self._wakes = min(list(self._due.values()), default=inf)
                if self._wakes == inf:
                    self._thread = None
                    return
                self._changed.wait(max(0.0, self._wakes - monotonic()))
                self._wakes = inf
            now = monotonic()
            for call, due in list(self._due.items()):
                if due <= now and self._due.pop(call, None) is not None:
                    call.expire()
