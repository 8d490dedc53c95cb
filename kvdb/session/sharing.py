"""Running sessions that others stand on before they are stored."""

from contextlib import suppress
from threading import Lock

from kvdb.catalog.contexts.prefix_tree import common_prefix
from kvdb.catalog.segments.overhead import segment_nbytes
from kvdb.catalog.segments.packed_ids import PackedIds
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import SegmentView, Views, release_views, visible_tokens
from kvdb.errors import CapacityError
from kvdb.session.state import SessionState
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import Reservation
from kvdb.types import ModelSpec, Tokens


class SharedTail:
    """The full blocks of a session's tails, as a segment that no context names. It is made when the first session stands on it,
    and anew when one could stand on more. The session's own appends never change it, because blocks that are shared are copied
    before they are written. The caller holds the session's turn."""

    def __init__(self, sessions: "SharedSessions", session: SessionState) -> None:
        self._sessions = sessions
        self._session = session
        self._segment: Segment | None = None

    @property
    def tables(self) -> list[BlockTable]:
        """The tables of the segment."""
        return [] if self._segment is None else self._segment.tables

    def views(self, ids: Tokens, more_than: int) -> Views:
        """Views of the longest beginning of a prompt that the session holds in full blocks in every layer; the caller owns a
        reference to each segment. None where that is not more than so many tokens. Raises CapacityError."""
        session = self._session
        size = session.tails[0].layout.block_size
        known = session.tokens[: session.start + min(tail.length for tail in session.tails)]
        full, held = ((n - session.start) // size * size for n in (common_prefix(known, ids), len(known)))
        if full <= 0 or session.start + full <= more_than:
            return ()
        if self._segment is None or len(self._segment) < full:
            self.forget()
            self._segment = _segment_of(session, known[session.start : session.start + held])
        views = (*session.views, SegmentView(self._segment, full))
        for view in views:
            view.segment.retain()
        return views

    def forget(self) -> None:
        """Give the segment back: the session has ended, or no longer holds these tokens. Sessions on it keep it."""
        if self._segment is not None:
            self._segment.release()
            self._segment = None

    def close(self) -> None:
        """Nobody else finds the session from now on."""
        self._sessions.remove(self._session)
        self.forget()


class SharedSessions:
    """The running sessions that are shared. Thread-safe."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], list[SessionState]] = {}
        self._lock = Lock()

    def add(self, session: SessionState) -> None:
        """Share a session on a prefix, until it is closed."""
        session.shared = SharedTail(self, session)
        with self._lock:
            self._by_key.setdefault((session.spec.digest, session.salt), []).append(session)

    def remove(self, session: SessionState) -> None:
        """Share it no more."""
        key = session.spec.digest, session.salt
        with self._lock:
            self._by_key[key].remove(session)
            if not self._by_key[key]:
                del self._by_key[key]

    def extended(self, spec: ModelSpec, salt: str, ids: Tokens, views: Views) -> Views:
        """The stored prefix of a prompt, or what a running session has of it, where that is more and the budget has room for it.
        Takes over the references to the views, and the caller owns those to the answer's. Waits for a call under way of a session
        that has more."""
        with self._lock:
            sessions = list(self._by_key.get((spec.digest, salt), ()))
        for session in sessions:
            if common_prefix(session.tokens, ids) > visible_tokens(views):
                with suppress(CapacityError):
                    longer = session.beginning(ids, visible_tokens(views))
                    if longer:
                        release_views(views)
                        views = longer
        return views


def _segment_of(session: SessionState, tokens: Tokens) -> Segment:
    """The first tokens of a session's tails as a segment, which shares their blocks. Raises CapacityError."""
    beside = Reservation(session.services.budget, segment_nbytes(len(session.tails), len(tokens)))
    tables = [tail.share() for tail in session.tails]
    for table in tables:
        table.truncate(len(tokens))
    return Segment(PackedIds(tokens), tables, base=session.start, standalone=not session.start, beside=beside)
