"""How often a segment is opened and queried; from this the policy decides whether an index over it would pay."""

from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True)
class QueryCounts:
    """Counts of the queries of one segment, each a call on one layer, and the seconds of the segment's share of these calls.

    searches: the number of queries that an index answered. attended: the sum of the shares of the tokens that these attended.
    exact_seconds, exact_tokens: the seconds and tokens of the queries that read everything.
    """

    queries: int = 0
    seconds: float = 0.0
    searches: int = 0
    attended: float = 0.0
    exact_seconds: float = 0.0
    exact_tokens: int = 0

    def __add__(self, other: "QueryCounts") -> "QueryCounts":
        return QueryCounts(
            queries=self.queries + other.queries,
            seconds=self.seconds + other.seconds,
            searches=self.searches + other.searches,
            attended=self.attended + other.attended,
            exact_seconds=self.exact_seconds + other.exact_seconds,
            exact_tokens=self.exact_tokens + other.exact_tokens,
        )


class SegmentUsage:
    """Counts of the sessions and queries of one segment since it was stored. Thread-safe.

    opened: how many sessions were opened over it; sessions: how many are open. recent: the queries since its indexes last
    changed. queries_in_all: the number of queries since it was stored. exact_token_seconds: the seconds to read one token of a
    layer, from the last queries that read everything; None before any did.
    """

    def __init__(self) -> None:
        self.opened = self.queries_in_all = self.sessions = 0
        self.recent = QueryCounts()
        self.exact_token_seconds: float | None = None
        self._version = self._reviewed = 0
        self._lock = Lock()

    def count_session(self) -> int:
        """Count a session that is opened. Returns how many sessions were opened so far."""
        with self._lock:
            self.opened += 1
            return self.opened

    def count_open(self, more: int) -> None:
        """Add `more` to the number of open sessions; it may be negative."""
        with self._lock:
            self.sessions += more

    def count_queries(self, counts: QueryCounts, version: int, every: int) -> bool:
        """Count queries that were answered with that version of the indexes. Returns whether the indexes are due for a review: it
        takes `every` queries, and at least a sixteenth more queries than at the last review."""
        with self._lock:
            if version != self._version:  # the cost of earlier queries says nothing about what an index would save now
                self._version, self.recent = version, QueryCounts()
            self.recent += counts
            self.queries_in_all += counts.queries
            if counts.exact_tokens:
                self.exact_token_seconds = counts.exact_seconds / counts.exact_tokens
            if self.queries_in_all - self._reviewed < max(every, self._reviewed // 16):
                return False
            self._reviewed = self.queries_in_all
            return True
