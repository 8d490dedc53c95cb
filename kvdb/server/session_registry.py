"""The open sessions of all clients, under ids that cannot be guessed. One that nobody uses is closed."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock
from time import monotonic

from kvdb.errors import KvdbError, SessionClosed
from kvdb.events import Events, Kind, Origin, originating
from kvdb.session.state import SessionState


@dataclass
class _Entry:
    state: SessionState
    used: float  # seconds of the monotonic clock, when the last call ended
    calls: int = 0  # under way


class Borrowed:
    """A session in use, until its `with` ends. A context manager by hand, because each step of decoding needs one."""

    __slots__ = ("_entry", "_lock")

    def __init__(self, entry: _Entry, lock: Lock) -> None:
        self._entry = entry
        self._lock = lock

    def __enter__(self) -> SessionState:
        return self._entry.state

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entry.calls -= 1
            self._entry.used = monotonic()


class Sessions:
    """A registry that closes a session when no call has used it for `idle_seconds`. Thread-safe.

    ended: called with the id of each session that was closed, by its client or for being idle. events: told of the
    latter. opened: called with each session that is added, before.
    """

    def __init__(
        self,
        idle_seconds: float,
        ended: Callable[[str], None],
        events: Events | None = None,
        opened: Callable[[SessionState], None] = lambda _session: None,
    ) -> None:
        self._idle_seconds = idle_seconds
        self._ended = ended
        self._opened = opened
        self._events = events or Events()
        self.admit: Callable[[int], None] = lambda _opened: None
        """Raises where there are so many that no other may be added."""
        self.tenant = ""
        """The tenant whose sessions they are."""
        self._entries: dict[str, _Entry] = {}
        self._lock = Lock()

    def add(self, state: SessionState) -> str:
        """Take over a session. Returns its id, under which it is found from now on. Raises what `admit` raises, and has closed
        it."""
        state.tenant = self.tenant
        self._opened(state)
        try:
            with self._lock:
                self.admit(len(self._entries))
                self._entries[state.id] = _Entry(state, monotonic())
        except KvdbError:
            state.close()
            raise
        return state.id

    def states(self) -> list[SessionState]:
        """The sessions, in the order in which they were opened."""
        with self._lock:
            return [entry.state for entry in self._entries.values()]

    def peek(self, name: str) -> SessionState | None:
        """The session, to look at what never changes, or None."""
        with self._lock:
            entry = self._entries.get(name)
            return None if entry is None else entry.state

    def borrow(self, name: str) -> "Borrowed":
        """For `with`: the session, which does not count as idle while the body runs. Raises SessionClosed."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                raise SessionClosed(
                    f"the server holds no such session: it was closed, or nobody used it for {self._idle_seconds:g} s; "
                    "open another with create_session"
                )
            entry.calls += 1
        return Borrowed(entry, self._lock)

    @contextmanager
    def borrow_all(self, names: Iterable[str]) -> Iterator[list[SessionState]]:
        """`borrow` several. Raises SessionClosed for the first that is not there."""
        with ExitStack() as used:
            yield [used.enter_context(self.borrow(name)) for name in names]

    def close(self, name: str) -> None:
        """Close the session; one that is not there was closed before."""
        with self._lock:
            entry = self._entries.pop(name, None)
        if entry is not None:
            self._end(name, entry)

    def close_idle(self) -> None:
        """Close those that nobody has used for too long."""
        since = monotonic() - self._idle_seconds
        with self._lock:
            idle = [(name, entry) for name, entry in self._entries.items() if not entry.calls and entry.used < since]
            for name, _ in idle:
                del self._entries[name]
        with originating(Origin(self.tenant)):
            for name, entry in idle:
                self._events.tell(Kind.SESSION_EXPIRED, idle_seconds=self._idle_seconds)
                self._end(name, entry)

    def close_all(self) -> None:
        with self._lock:
            names = list(self._entries)
        for name in names:
            self.close(name)

    def _end(self, name: str, entry: _Entry) -> None:
        entry.state.close()
        self._ended(name)
