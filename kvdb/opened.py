"""The sessions and imports that are open in a database."""

from threading import Lock
from typing import NamedTuple

from kvdb.catalog.overlay import Overlay
from kvdb.catalog.segment import Segment
from kvdb.imports import Import
from kvdb.session import SessionState
from kvdb.storage.table import BlockTable


class Held(NamedTuple):
    """The segments that are viewed, the overlays, and the tables beside both."""

    segments: set[Segment]
    overlays: list[Overlay]
    tables: list[BlockTable]


class Opened:
    """A registry of what holds blocks beside the contexts. Thread-safe."""

    def __init__(self) -> None:
        self.sessions: set[SessionState] = set()
        self._imports: set[Import] = set()
        self._lock = Lock()

    def add_session(self, session: SessionState) -> None:
        with self._lock:
            self.sessions.add(session)
        for view in session.basis.views:
            view.segment.use.hold(1)

    def drop_session(self, session: SessionState) -> None:
        with self._lock:
            self.sessions.discard(session)
        for view in session.basis.views:
            view.segment.use.hold(-1)

    def add_import(self, writing: Import) -> None:
        with self._lock:
            self._imports.add(writing)

    def drop_import(self, writing: Import) -> None:
        with self._lock:
            self._imports.discard(writing)

    def held(self) -> Held:
        """What sessions and imports hold now."""
        with self._lock:
            segments = {view.segment for session in self.sessions for view in session.basis.views}
            segments.update(view.segment for writing in self._imports for view in writing.views)
            overlays = [session.basis.overlay for session in self.sessions if session.basis.overlay is not None]
            tables = [table for session in self.sessions for table in session.tails]
            tables += [table for writing in self._imports for table in writing.tables]
        return Held(segments, overlays, tables)

    def close(self) -> None:
        """Close every session, and abort every import."""
        with self._lock:
            sessions, imports = list(self.sessions), list(self._imports)
        for session in sessions:
            session.close()
        for writing in imports:
            writing.abort()
