"""Counters of the queries of one layer of one session, for the segments that it reads."""

from collections.abc import Callable

from kvdb.catalog.segment import Segment
from kvdb.catalog.segment_view import Views
from kvdb.catalog.usage import QueryCounts

FLUSH_QUERIES = 64
"""After this many queries, their counts are handed to the segments."""


class SegmentCounters:
    """Counts queries, and regularly hands each segment its share. tell: receives a segment and the counts of its queries."""

    def __init__(self, views: Views, tell: Callable[[Segment, QueryCounts], None]) -> None:
        self._views = views
        self._tell = tell
        self._tokens = 0
        self._reset()

    def count(self, queries: int, nanoseconds: int, retrieved: float, tokens: int, *, searched: bool) -> None:
        """Count queries that attended `retrieved` tokens in all, of `tokens` each. searched: whether an index found them."""
        self._queries += queries
        self._nanoseconds += nanoseconds
        self._tokens = tokens
        if searched:
            self._attended += retrieved / tokens
        else:
            self._whole += queries
            self._whole_nanoseconds += nanoseconds
        if self._queries >= FLUSH_QUERIES:
            self.flush()

    def flush(self) -> None:
        """Hand the segments the counts of all queries since the last time."""
        if self._queries:
            for view in self._views:
                share = view.visible / self._tokens / 1e9
                counts = QueryCounts(
                    queries=self._queries,
                    seconds=self._nanoseconds * share,
                    searches=self._queries - self._whole,
                    attended=self._attended,
                    exact_seconds=self._whole_nanoseconds * share,
                    exact_tokens=self._whole * view.visible,
                )
                self._tell(view.segment, counts)
            self._reset()

    def _reset(self) -> None:
        self._queries = self._nanoseconds = self._whole = self._whole_nanoseconds = 0
        self._attended = 0.0
