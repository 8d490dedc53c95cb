"""Turns: the calls of one session go one after the other, and each client has only so many under way.

A call that waits for its turn takes no thread. It is kept here with its message until the calls before it have ended, and goes
on in a thread of the pool then.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock

from kvdb.errors import CapacityError


@dataclass(frozen=True, eq=False)
class _Call:
    """client: whose calls it counts among, "" for those of nobody. go_on: called when its turn has come."""

    client: str
    sessions: frozenset[str]
    go_on: Callable[[], object]


class Turns:
    """The calls under way and those that wait. Thread-safe.

    submit: hands work to a thread of the pool. running_max: how many calls of one client are under way at a time. waiting_max:
    how many more of it may wait.
    """

    def __init__(self, submit: Callable[..., object], running_max: int, waiting_max: int) -> None:
        self._submit = submit
        self._running_max = running_max
        self._waiting_max = waiting_max
        self._busy: set[str] = set()
        self._running: Counter[str] = Counter()
        self._waiting: list[_Call] = []
        self._lock = Lock()

    def call(self, client: str, sessions: Collection[str], work: Callable[[], None]) -> None:
        """Do the work when no other call uses these sessions: now, in this thread, or later in one of the pool.

        Raises CapacityError where too many calls of the client wait; then the work is not done.
        """

        def carry_out() -> None:
            try:
                work()
            finally:
                self._end(client, call.sessions)

        call = _Call(client, frozenset(sessions), lambda: self._submit(carry_out))
        if self._begin(call):
            carry_out()

    @contextmanager
    def held(self, session: str) -> Iterator[None]:
        """Wait in this thread for the session's turn, and have it while the body runs."""
        with self._lock:
            free = not self._waiting and session not in self._busy  # nearly always, and a decode step is short
            if free:
                self._busy.add(session)
        if not free:
            come = Event()
            if not self._begin(_Call("", frozenset([session]), come.set)):
                come.wait()
        try:
            yield
        finally:
            self._end("", (session,))

    def _begin(self, call: _Call) -> bool:
        """Whether its turn is now; otherwise it waits. Raises CapacityError."""
        with self._lock:
            reserved = {name for waiting in self._waiting for name in waiting.sessions} if self._waiting else frozenset()
            if self._may_run(call, reserved):
                self._take(call)
                return True
            if call.client and sum(waiting.client == call.client for waiting in self._waiting) >= self._waiting_max:
                raise CapacityError(
                    f"{self._waiting_max} calls of this client wait for their turn already; "
                    "wait for answers before more is asked, or use a Decode stream for each session"
                )
            self._waiting.append(call)
            return False

    def _end(self, client: str, sessions: Iterable[str]) -> None:
        with self._lock:
            self._busy.difference_update(sessions)
            if client:
                self._running[client] -= 1
                if not self._running[client]:
                    del self._running[client]
            ready = self._ready() if self._waiting else []
        for waiting in ready:
            waiting.go_on()

    def _ready(self) -> list[_Call]:
        """Take those whose turn has come, in their order: of each session, the one that waited longest."""
        ready, waiting, reserved = [], [], set[str]()
        for call in self._waiting:
            if self._may_run(call, reserved):
                self._take(call)
                ready.append(call)
            else:
                reserved |= call.sessions
                waiting.append(call)
        self._waiting = waiting
        return ready

    def _may_run(self, call: _Call, reserved: Collection[str]) -> bool:
        free = self._busy.isdisjoint(call.sessions) and call.sessions.isdisjoint(reserved)
        return free and (not call.client or self._running[call.client] < self._running_max)

    def _take(self, call: _Call) -> None:
        self._busy |= call.sessions
        if call.client:
            self._running[call.client] += 1
