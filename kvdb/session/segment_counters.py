"""Counters of the queries of one layer of one session, for the segments that it reads."""

from indexes.retrieval import Exact
from kvdb.attention.exact import AttentionStats
from kvdb.catalog.evidence.usage import QueryCounts
from kvdb.catalog.segments.segment_view import Views
from kvdb.session.services import SessionServices
from query_optimizer.query_options import QueryOptions

FLUSH_QUERIES = 64
"""After this many queries, their counts are handed to the segments."""
DECODE_TOKENS = 16
"""A call of more tokens is a prefill. Its time says nothing about a decode step, so it is not counted."""


class SegmentCounters:
    """Counts queries, and regularly tells the advisor each segment's share."""

    def __init__(self, views: Views, services: SessionServices) -> None:
        self._views = views
        self._short = services.config.optimizer.short_context_tokens
        self._tell = services.advisor.count_queries
        self._tokens = 0
        self._reset()

    def count(self, calls: int, n: int, options: QueryOptions, stats: AttentionStats, tokens: int, *, searched: bool) -> None:
        """Count calls of n queries each, if they were decode steps that an index could have answered. stats: sums over the calls.
        tokens: in the layer. searched: whether an index answered."""
        if n > DECODE_TOKENS or isinstance(options.retrieval, Exact) or tokens <= self._short:
            return
        self._queries += calls
        self._nanoseconds += stats.kernel_ns
        self._tokens = tokens
        if searched:
            self._attended += stats.retrieved / tokens
        else:
            self._whole += calls
            self._whole_nanoseconds += stats.kernel_ns
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
