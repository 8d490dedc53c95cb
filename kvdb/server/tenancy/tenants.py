"""The tenants of a server: each has a view of the database and sessions of its own."""

from collections.abc import Callable, Iterator
from threading import Lock
from typing import Generic, TypeVar

from kvdb.database import Database
from kvdb.server.session_registry import Sessions
from kvdb.server.tenancy.database import TenantDatabase
from kvdb.server.tenancy.tokens_file import Principal
from kvdb.session.state import SessionState

AnyDatabase = Database | TenantDatabase
T = TypeVar("T")


class Tenants(Generic[T]):
    """What answers the calls of each tenant, made when its first call comes. Thread-safe.

    A session of one tenant is in none of the others' registries, so that for them it is as one that was never there.
    """

    def __init__(
        self, database: Database, open_sessions: Callable[[], Sessions], open_service: Callable[[AnyDatabase, Sessions, str], T]
    ) -> None:
        """open_sessions: makes a registry of sessions. open_service: makes what answers calls on a database and a
        registry, for a tenant of that name, "" for whoever sees all."""
        self._database = database
        self._open_sessions = open_sessions
        self._open_service = open_service
        self._services: dict[str, tuple[Sessions, AnyDatabase, T]] = {}
        self._lock = Lock()

    def service(self, whose: Principal) -> T:
        """What answers its calls."""
        return self._of(whose)[2]

    def view(self, whose: Principal) -> AnyDatabase:
        """The database as it sees it."""
        return self._of(whose)[1]

    def peek(self, name: str) -> SessionState | None:
        """The session of that id, whosever it is, to look at what never changes; or None."""
        return next((state for sessions in self._registries() if (state := sessions.peek(name)) is not None), None)

    def close_idle(self) -> None:
        """Close every session that nobody has used for too long."""
        for sessions in self._registries():
            sessions.close_idle()

    def close_all(self) -> None:
        """Close every session."""
        for sessions in self._registries():
            sessions.close_all()

    def _of(self, whose: Principal) -> tuple[Sessions, AnyDatabase, T]:
        key = "" if whose.admin else whose.tenant
        assert key or whose.admin, "only whoever runs the server has no name"
        with self._lock:
            known = self._services.get(key)
            if known is None:
                sessions = self._open_sessions()
                sessions.tenant = key
                view: AnyDatabase = self._database
                if not whose.admin:
                    view = TenantDatabase(self._database, whose.tenant, sessions.states)
                    sessions.admit = view.quota.check_sessions
                known = self._services[key] = sessions, view, self._open_service(view, sessions, key)
        return known

    def _registries(self) -> Iterator[Sessions]:
        with self._lock:
            known = list(self._services.values())
        return (sessions for sessions, _, _ in known)
