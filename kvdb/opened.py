"""The sessions and imports that are open in a database."""

from collections.abc import Sequence
from threading import Lock

from kvdb.catalog.catalog import Context
from kvdb.imports import Import
from kvdb.session import SessionState
from kvdb.storage.segment_file import SegmentFile
from kvdb.storage.table import BlockTable


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

    def owners(self, contexts: Sequence[Context]) -> tuple[list[BlockTable], list[SegmentFile]]:
        """Every table that holds blocks, and every file, of what is open and of these contexts."""
        segments, overlays = {view.segment for context in contexts for view in context.views}, [c.overlay for c in contexts]
        with self._lock:
            segments.update(view.segment for session in self.sessions for view in session.basis.views)
            segments.update(view.segment for writing in self._imports for view in writing.views)
            overlays += [session.basis.overlay for session in self.sessions]
            tables = [table for session in self.sessions for table in session.tails]
            tables += [table for writing in self._imports for table in writing.tables]
        tables += [table for overlay in overlays if overlay is not None for table in overlay.tables]
        tables += [table for segment in segments for table in segment.tables]
        return tables, [segment.file for segment in segments if segment.file is not None]

    def close(self) -> None:
        """Close every session, and abort every import."""
        with self._lock:
            sessions, imports = list(self.sessions), list(self._imports)
        for session in sessions:
            session.close()
        for writing in imports:
            writing.abort()
