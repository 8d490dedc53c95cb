"""What others than its holder are told of an open session."""

import kvdb.deadlines as deadlines
from kvdb.errors import NotFound, SessionClosed
from kvdb.session.activity import SessionActivity
from kvdb.session.open_handles import OpenHandles, counted_call
from kvdb.session.state import SessionState
from kvdb.types import Activity, ContextInfo, Retention, SessionInfo, Tokens
from query_optimizer.plan import Plan
from query_optimizer.query_options import QueryOptions


class SessionOperations:
    """The calls of a database about sessions that were opened with a label. The database sets what they work on. Thread-safe."""

    handles: OpenHandles
    _activity: SessionActivity

    @counted_call
    def store_session(
        self, session: SessionState, name: str, tokens: Tokens | None, *, chunk: bool, retention: Retention
    ) -> ContextInfo:
        """Keep everything in a session as a context; see `SessionState.store`, whose errors it raises."""
        return session.store(name, tokens, chunk=chunk, retention=retention)

    @counted_call
    def sessions(self) -> list[SessionInfo]:
        """The open sessions that have a label, in the order in which they were opened."""
        told = []
        for session in self._labelled():
            try:
                stats = session.stats()
            except SessionClosed:
                continue  # meanwhile
            told.append(SessionInfo(session.label, stats.tokens, stats.reused, stats.queries))
        return told

    @counted_call
    def activity(self) -> Activity:
        """What all sessions have done together. Sessions in a call are not waited for: what it does counts the next time."""
        for session in self._open():
            session.try_count()
        return self._activity.totals()

    @counted_call
    def open_sessions(self) -> list[SessionState]:
        """The open sessions, with a label or without, in the order in which they were opened."""
        return self._open()

    @counted_call
    def count_sessions(self) -> int:
        """How many sessions are open."""
        return len(self._open())

    @counted_call
    def explain_session(self, label: str, layer: int | None, options: QueryOptions, analyze: bool) -> list[Plan]:
        """The plans of the next query of a session, for one layer or for each. analyze: whether to carry them out, for each
        layer's last query. Raises NotFound, LayerError, InvalidArgument, or SessionClosed."""
        found = [session for session in self._labelled() if session.label == label]
        if not found:
            raise NotFound(f"no open session has the label {label!r}; kvdb explain --session lists those that have one")
        layers = range(found[-1].spec.layers) if layer is None else [layer]
        return [found[-1].explain(number, options, analyze) for number in deadlines.each(layers)]

    def _open(self) -> list[SessionState]:
        return [handle for handle in self.handles.open() if isinstance(handle, SessionState)]

    def _labelled(self) -> list[SessionState]:
        return [session for session in self._open() if session.label]
