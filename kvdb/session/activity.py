"""What all sessions of a database have done together, those that are closed too."""

from threading import Lock

from kvdb.catalog.segments.segment_view import Views
from kvdb.session.counters import SessionCounters
from kvdb.types import Activity


class SessionActivity:
    """Sums over sessions, which never become less. Thread-safe; an open session counts without taking a lock."""

    def __init__(self) -> None:
        self._open: set[SessionCounters] = set()
        self._ended = SessionCounters()
        self._opened = 0
        self._prompt_tokens = {"cpu": 0, "disk": 0, "none": 0}
        self._lock = Lock()

    def begin(self) -> SessionCounters:
        """The counters of one more session."""
        counters = SessionCounters()
        with self._lock:
            self._opened += 1
            self._open.add(counters)
        return counters

    def end(self, counters: SessionCounters) -> None:
        """A session is closed and counts nothing any more."""
        with self._lock:
            self._open.discard(counters)
            self._ended.add(counters)

    def count_prompt(self, tokens: int, views: Views) -> None:
        """Count the tokens of a prompt by where their KV was found, in `views`, which are not pinned yet."""
        found = {"cpu": 0, "disk": 0}
        for view in views:
            found["cpu" if view.segment.resident else "disk"] += view.visible
        with self._lock:
            for tier, number in found.items():
                self._prompt_tokens[tier] += number
            self._prompt_tokens["none"] += max(0, tokens - sum(found.values()))

    def totals(self) -> Activity:
        """The sums of now."""
        with self._lock:
            total = SessionCounters()
            for counters in (self._ended, *self._open):
                total.add(counters)
            return Activity(
                sessions_open=len(self._open),
                sessions_opened=self._opened,
                queries=total.queries,
                tokens_seen=total.tokens_seen,
                tokens_scanned=total.tokens_scanned,
                tokens_retrieved=total.tokens_retrieved,
                bytes_read=total.bytes_read,
                missed_mass=total.missed,
                missed_mass_bound=total.missed_bound,
                seconds=total.seconds(),
                rules=dict(total.rules),
                prompt_tokens=dict(self._prompt_tokens),
            )
