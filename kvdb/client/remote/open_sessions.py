"""The sessions that a connection has open, so that they are closed before it."""

from threading import Lock
from typing import Protocol
from weakref import WeakSet

from kvdb.errors import Unavailable


class OpenSession(Protocol):
    """A session that somebody may have forgotten."""

    def close(self) -> None: ...


class OpenSessions:
    """Sessions that are not yet garbage. Thread-safe."""

    def __init__(self) -> None:
        self._sessions: WeakSet[OpenSession] = WeakSet()
        self._open = True
        self._lock = Lock()

    def check_open(self) -> None:
        """Raises Unavailable once they were closed."""
        if not self._open:
            raise Unavailable("the database is closed; connect again")

    def add(self, session: OpenSession) -> None:
        """Raises Unavailable once they were closed; then the caller closes the session."""
        with self._lock:
            self.check_open()
            self._sessions.add(session)

    def close(self) -> bool:
        """Close every session, and take no more; whether there was anything to close. Of several threads, one does it."""
        with self._lock:
            if not self._open:
                return False
            self._open = False
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        return True
