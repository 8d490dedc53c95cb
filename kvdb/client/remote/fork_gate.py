"""Keeps forks and calls over gRPC apart.

gRPC makes itself ready for a fork, and anew in the child, unless a thread is in one of its calls: then it leaves everything as it
is, and a child that opens a channel fails at some time, by a signal.
"""

import os
from threading import Condition, RLock

from kvdb.errors import ForkedProcess

FORK_SECONDS_MAX = 0.2
"""How long a fork waits for calls under way. Calls that come meanwhile wait for the fork."""


class ForkGate:
    """A call over gRPC is inside of a `with`. Thread-safe."""

    def __init__(self) -> None:
        self._unready = 0  # the parent of this process, 0 where gRPC was ready for the fork
        self._begin()
        os.register_at_fork(before=self._close, after_in_parent=self._open, after_in_child=self._begin_child)

    def check(self) -> None:
        """Raises ForkedProcess where gRPC would fail."""
        if self._unready:
            raise ForkedProcess(
                f"process {self._unready} was forked into this one, {os.getpid()}, while its threads were in calls on a server, "
                "and gRPC cannot begin anew here; fork while there are none, or use multiprocessing's spawn"
            )

    def __enter__(self) -> None:
        with self._lock:
            if self._forks:
                self._changed.wait_for(lambda: not self._forks)
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._forks:
                self._changed.notify_all()

    def _close(self) -> None:
        with self._lock:
            self._forks += 1
            self._changed.wait_for(lambda: not self._calls, FORK_SECONDS_MAX)

    def _open(self) -> None:
        with self._lock:
            self._forks -= 1
            self._changed.notify_all()

    def _begin_child(self) -> None:
        self._unready = self._unready or (self._process if self._calls else 0)
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = RLock()  # a signal's handler may fork
        self._changed = Condition(self._lock)
        self._calls = self._forks = 0


GATE = ForkGate()
