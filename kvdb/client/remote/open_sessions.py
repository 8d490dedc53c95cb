"""The open sessions of a connection, which are closed before the connection is."""

from threading import Lock
from typing import Protocol
from weakref import WeakSet

import kvdb.forks as forks
from kvdb.errors import Unavailable


class OpenSession(Protocol):
    """A session that can be closed."""

    def close(self) -> None: ...


class OpenSessions:
    """Open sessions, without those that Python has collected. Thread-safe."""

    def __init__(self) -> None:
        self._open = True
        self._begin()
        forks.in_child(self, OpenSessions._begin)  # those of a parent stay its own

    def check_open(self) -> None:
        """Raises Unavailable after `close`."""
        if not self._open:
            raise Unavailable("the database is closed; connect again")

    def add(self, session: OpenSession) -> None:
        """Add a session. Raises Unavailable after `close`; then the caller closes the session."""
        with self._lock:
            self.check_open()
            self._sessions.add(session)

    def close(self) -> bool:
        """Close every session, and accept no more. Returns whether this call was the first."""
        with self._lock:
            if not self._open:
                return False
            self._open = False
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        return True

    def _begin(self) -> None:
        self._sessions: WeakSet[OpenSession] = WeakSet()
        self._lock = Lock()
