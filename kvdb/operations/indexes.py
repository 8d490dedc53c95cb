"""The indexes over stored contexts, and the plans of queries of them."""

from collections.abc import Callable
from contextlib import closing

import kvdb.catalog.residency as residency
import kvdb.deadlines as deadlines
import kvdb.indexing.status as status
from kvdb.catalog.segment_view import Views
from kvdb.config import Config
from kvdb.indexing.builder import IndexBuilder
from kvdb.operations.reading import ReadOperations
from kvdb.session.open_handles import counted_call
from kvdb.types import IndexInfo
from query_optimizer.plan import Plan
from query_optimizer.query_options import QueryOptions


class IndexOperations(ReadOperations):
    """The calls of a database that are about indexes and plans. The database sets what they work on. Thread-safe."""

    config: Config
    _builder: IndexBuilder

    @counted_call
    def build_index(
        self, name: str, kind: str, wait: bool = True, is_wanted: Callable[[], bool] = lambda: True
    ) -> list[IndexInfo]:
        """Build that kind of index over the segments of a context that are long enough. Returns the indexes over the context.

        wait: whether to wait until it is built, or `is_wanted` says no; otherwise it is built in the background. Raises NotFound,
        InvalidArgument for a kind that does not exist, CapacityError where the indexes would keep more than indexes.bytes_max,
        Unsupported for a kind whose library is not installed, Unavailable, and what the build itself raised.
        """
        with self._catalog.borrow(name) as context:
            views = context.views
            with residency.pinned(self._long(views), self._blocks.loader):
                builds = self._builder.request([view.segment for view in self._long(views)], kind)
            if wait:
                status.wait(builds, is_wanted)
            return status.index_infos(views)

    @counted_call
    def indexes(self, name: str) -> list[IndexInfo]:
        """The indexes over the segments of a context. Raises NotFound."""
        with self._catalog.borrow(name) as context:
            views = context.views
            return status.index_infos(views)

    @counted_call
    def verify(self, name: str) -> int:
        """Check every index of a context against its keys. Returns how many were checked. Raises NotFound or IntegrityError."""
        with self._catalog.borrow(name) as context:
            views = context.views
            indexed = tuple(view for view in views if view.segment.indexes.built())
            with residency.pinned(indexed, self._blocks.loader):
                return status.verify(indexed)

    @counted_call
    def explain(self, name: str, layer: int | None, options: QueryOptions, analyze: bool) -> list[Plan]:
        """The plans of a query by one more token behind a context, for one layer or for each. analyze: whether to carry them out,
        with queries that were kept when the context was stored. Raises NotFound, LayerError or InvalidArgument."""
        with closing(self.open_context(name)) as session:
            for view in session.views:
                session.set_last_queries(view.segment.indexes.queries)
            layers = range(session.spec.layers) if layer is None else [layer]
            return [session.explain(number, options, analyze) for number in deadlines.each(layers)]

    def _long(self, views: Views) -> Views:
        """The views whose segments are long enough for an index."""
        return tuple(view for view in views if len(view.segment) >= self.config.indexes.segment_tokens_min)
