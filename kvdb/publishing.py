"""How contexts come to be: from imports, and from sessions that are stored."""

from collections.abc import Callable, Mapping

import kvdb.check as check
from indexes.base import Float32
from kvdb.blend.rope import inverse_frequencies
from kvdb.catalog.catalog import Catalog, Context, let_go, release
from kvdb.catalog.indexes import IndexSet
from kvdb.catalog.layout import Layout
from kvdb.catalog.prefix_tree import concatenate
from kvdb.catalog.segment import Segment, SegmentView, Views, visible_tokens
from kvdb.errors import CapacityError, InvalidArgument
from kvdb.session import SessionState
from kvdb.storage.table import BlockTable
from kvdb.types import ContextInfo, ModelSpec, Tokens


class Publisher:
    """Makes contexts of tokens and blocks. The catalogue hears of one last, so that what fails before is invisible.

    published: called with the views of each new context.
    """

    def __init__(self, catalog: Catalog, published: Callable[[Views], None]) -> None:
        self._catalog = catalog
        self._published = published

    def store(self, session: SessionState, name: str, tokens: Tokens | None, *, chunk: bool = False) -> ContextInfo:
        """Keep a session's tokens as a context; the session goes on. What is stored already is not stored again.

        chunk: as a chunk, which may stand anywhere, of a session that was opened on nothing. Raises AlreadyExists,
        InvalidArgument, PositionError or CapacityError, Unsupported for a chunk of a model whose keys cannot be moved, and then
        nothing is stored.
        """
        self._catalog.check_free(check.name(name))
        ids = session.ids(tokens)
        if chunk:
            return self._store_chunk(session, name, ids)
        if session.basis.overlay is not None:
            return self._store_laid_out(session, name, ids)
        views = self._catalog.match(session.spec, ids)
        if visible_tokens(views) < session.reused:  # the contexts this session was opened on were dropped meanwhile
            release(views)
            views = session.basis.share().views
        stored = visible_tokens(views)
        try:
            tables = _tail_of(session, stored) if stored < len(ids) else []
        except CapacityError:
            release(views)
            raise
        return self.publish(session.spec, name, views, ids[stored:], tables, session.samples())

    def publish(  # a context is made of all of these
        self,
        spec: ModelSpec,
        name: str,
        views: Views,
        tokens: Tokens,
        tables: list[BlockTable],
        samples: Mapping[int, Float32],
    ) -> ContextInfo:
        """Make a context of the views and, behind them, a new segment of `tokens` and `tables`, if there are any.

        samples: queries that were asked of it, float32 `[q_heads, m, head_dim]` by layer, from which its indexes learn.

        Takes over the references to the views and the tables, also when it raises AlreadyExists.
        """
        if len(tokens):
            start = visible_tokens(views)
            segment = Segment(tokens, tables, IndexSet(samples), start, alone=not start)
            views = (*views, SegmentView(segment, len(tokens)))
        return self._publish(Context(name, spec, Layout.behind_each_other(views), concatenate(views)))

    def publish_chunk(
        self,
        spec: ModelSpec,
        name: str,
        tokens: Tokens,
        tables: list[BlockTable],
        base: int,
        samples: Mapping[int, Float32],
    ) -> ContextInfo:
        """Make a chunk of `tokens`, whose first was computed at position `base`; of a text that is stored, another name.

        Takes over the references to the tables, which may be empty if the text is stored. Raises AlreadyExists.
        """
        views = self.chunk_views(spec, tokens)
        if views:
            for table in tables:
                table.release()
        else:
            segment = Segment(tokens, tables, IndexSet(samples), base, alone=True)
            views = (SegmentView(segment, len(tokens), -base),)
        return self._publish(Context(name, spec, Layout.behind_each_other(views), tokens))

    def chunk_views(self, spec: ModelSpec, tokens: Tokens) -> Views:
        """The stored chunk of exactly these tokens, if there is one; the caller owns a reference to it."""
        segment = self._catalog.chunk(spec, tokens)
        return () if segment is None else (SegmentView(segment, len(tokens), -segment.base),)

    def _publish(self, context: Context) -> ContextInfo:
        """Take over a context; its indexes are built. Raises AlreadyExists, and then it is let go."""
        published = False
        try:
            self._catalog.publish(context)
            published = True
        finally:
            if not published:
                let_go(context)
        self._published(context.views)
        return context.info()

    def _store_chunk(self, session: SessionState, name: str, ids: Tokens) -> ContextInfo:
        if session.start:
            raise InvalidArgument(
                f"the session stands on {session.start} tokens; a chunk is computed alone, in a session opened on no tokens"
            )
        inverse_frequencies(session.spec.rope, session.spec.head_dim)
        return self.publish_chunk(session.spec, name, ids, _tail_of(session, 0), 0, session.samples())

    def _store_laid_out(self, session: SessionState, name: str, ids: Tokens) -> ContextInfo:
        """What was laid out and recomputed, and behind it the tail as a segment that is exact only there."""
        tables = _tail_of(session, session.start) if session.start < len(ids) else []
        basis = session.basis.share()
        views = basis.views
        if tables:
            segment = Segment(ids[session.start :], tables, IndexSet(session.samples()), session.start)
            views = (*views, SegmentView(segment, len(segment)))
        return self._publish(Context(name, session.spec, Layout(views, len(ids)), ids, basis.overlay))


def _tail_of(session: SessionState, start: int) -> list[BlockTable]:
    """Tables of a session's own tokens from position `start` on, one a layer. Raises CapacityError."""
    tables: list[BlockTable] = []
    try:
        for tail in session.tails:
            tables.append(tail.since(start - session.start))
    except CapacityError:
        for table in tables:
            table.release()
        raise
    return tables
