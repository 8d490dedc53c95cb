"""Turns: the calls of one session follow one another, and each client has a limited number under way.

A call that waits for its turn takes no thread: it is kept here, and told when the calls before it have ended.
"""

from collections.abc import Callable, Collection
from threading import Event, Lock
from time import perf_counter
from typing import NamedTuple

from kvdb.errors import CapacityError


class Turn(NamedTuple):
    """What a call uses. client: the client among whose calls it counts, "" for none. sessions: the ids of the sessions that it
    uses alone."""

    client: str
    sessions: frozenset[str]


class Turns:
    """The calls under way and those that wait. Thread-safe.

    running_max: how many calls of one client are under way at a time. waiting_max: how many more of it may wait. waited: told of
    each turn how many seconds it was waited for.
    """

    def __init__(self, running_max: int, waiting_max: int, waited: Callable[[float], None] = lambda _seconds: None) -> None:
        self._running_max = running_max
        self._waiting_max = waiting_max
        self._waited = waited
        self._busy: set[str] = set()
        self._running: dict[str, int] = {}
        self._waiting: list[tuple[Turn, Callable[[], object]]] = []
        self._closed = False
        self._lock = Lock()

    def begin(self, turn: Turn, go_on: Callable[[], object]) -> bool:
        """Whether the turn is now. Otherwise it waits, and `go_on` is called when it comes, in the thread that ended the one
        before, which it must neither keep nor use to begin or end a turn. Either way `end` it. Raises CapacityError where too
        many calls of the client wait; then there is no turn.
        """
        with self._lock:
            reserved = {name for waiting, _ in self._waiting for name in waiting.sessions} if self._waiting else ()
            if self._may_run(turn, reserved):
                self._take(turn)
                self._waited(0.0)
                return True
            if turn.client and sum(waiting.client == turn.client for waiting, _ in self._waiting) >= self._waiting_max:
                raise CapacityError(
                    f"{self._waiting_max} calls of this client wait for their turn already; "
                    "wait for answers before more is asked, or use a Decode stream for each session"
                )
            self._waiting.append((turn, self._timed(go_on)))
            return False

    def end(self, turn: Turn) -> None:
        """The turn is over; those that waited for it go on."""
        client, sessions = turn
        with self._lock:
            self._busy -= sessions
            if client:
                self._running[client] -= 1
                if not self._running[client]:
                    del self._running[client]
            if self._waiting:
                self._give(self._ready())

    def close(self) -> None:
        """Give every turn at once, to those that wait and to those that still come. For a server whose calls were all cancelled:
        what any of them does now, no client hears of."""
        with self._lock:
            self._closed = True
            self._give(self._ready())

    def take(self, turn: Turn) -> bool:
        """Whether the turn is now, without waiting for it; then `end` it."""
        with self._lock:
            if self._waiting or not self._may_run(turn):
                return False
            self._take(turn)
        self._waited(0.0)
        return True

    def wait(self, turn: Turn) -> None:
        """Wait in this thread for a turn. `end` it."""
        if self.take(turn):  # nearly always, and a decode step is short
            return
        come = Event()
        if not self.begin(turn, come.set):
            come.wait()

    def _timed(self, go_on: Callable[[], object]) -> Callable[[], object]:
        """`go_on`, which tells first how long it was waited for."""
        came = perf_counter()

        def tell() -> None:
            self._waited(perf_counter() - came)
            go_on()

        return tell

    def _ready(self) -> list[Callable[[], object]]:
        """Take the turns that have come, in their order: of each session, the one that waited longest."""
        ready, still, reserved = [], [], set[str]()
        for turn, go_on in self._waiting:
            if self._may_run(turn, reserved):
                self._take(turn)
                ready.append(go_on)
            else:
                reserved |= turn.sessions
                still.append((turn, go_on))
        self._waiting = still
        return ready

    def _give(self, turns: list[Callable[[], object]]) -> None:
        """Let them go on. The caller holds the lock, so that none goes on after `close` has returned."""
        for go_on in turns:
            go_on()

    def _may_run(self, turn: Turn, reserved: Collection[str] = ()) -> bool:
        """reserved: the sessions for which calls wait that came before."""
        if self._closed:
            return True
        client, sessions = turn
        free = self._busy.isdisjoint(sessions) and sessions.isdisjoint(reserved)
        return free and (not client or self._running.get(client, 0) < self._running_max)

    def _take(self, turn: Turn) -> None:
        self._busy |= turn.sessions
        if turn.client:
            self._running[turn.client] = self._running.get(turn.client, 0) + 1
