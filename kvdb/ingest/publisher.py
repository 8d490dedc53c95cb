"""Makes contexts out of imports, and out of sessions that are stored."""

from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import kvdb.validate as validate
from kvdb.blend.rope import inverse_frequencies
from kvdb.catalog.catalog import Catalog
from kvdb.catalog.context import Context
from kvdb.catalog.index_set import IndexSet
from kvdb.catalog.layout import Layout
from kvdb.catalog.overhead import context_nbytes, segment_nbytes
from kvdb.catalog.prefix_tree import concatenate
from kvdb.catalog.segment import Segment, SegmentView, Views, release_views, visible_tokens
from kvdb.catalog.stored_queries import StoredQueries
from kvdb.errors import CapacityError, InvalidArgument
from kvdb.indexing.advisor import IndexAdvisor
from kvdb.session.services import StorableSession
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import CpuBudget, Reservation
from kvdb.types import ContextInfo, ModelSpec, Tokens


class NewSegment(NamedTuple):
    """The contents of a segment that does not exist yet. It owns the tables and the queries.

    tokens: int32 `[n]`. tables: one a layer, of n tokens. base: the position of its first token when it was computed. queries:
    some queries that were asked of it.
    """

    tokens: Tokens
    tables: list[BlockTable]
    base: int
    queries: StoredQueries

    def view(self, budget: CpuBudget, *, standalone: bool, shift: int = 0) -> SegmentView:
        """All of the segment, which has taken everything over. Raises CapacityError, and then everything was given back."""
        with ExitStack() as undo:
            undo.callback(self.release)
            beside = Reservation(budget, segment_nbytes(len(self.tables), len(self.tokens)))
            undo.pop_all()
        ids = self.tokens.copy()  # a copy, because they may be the end of a longer array
        segment = Segment(ids, self.tables, IndexSet(self.queries), self.base, standalone=standalone, beside=beside)
        return SegmentView(segment, len(ids), shift)

    def release(self) -> None:
        """Release everything, because no segment is made."""
        self.queries.release()
        for table in self.tables:
            table.release()


class Publisher:
    """Makes contexts of tokens and blocks. The catalogue is told last, so that a failure before leaves nothing visible.

    budget: the budget of main memory, in which stored queries count. advisor: told about each new context.
    """

    def __init__(self, catalog: Catalog, budget: CpuBudget, advisor: IndexAdvisor) -> None:
        self.budget = budget
        self._catalog = catalog
        self._advisor = advisor

    def store(
        self, session: StorableSession, name: str, tokens: Tokens | None, *, chunk: bool = False, durability: str | None = None
    ) -> ContextInfo:
        """Store a session's tokens as a context; the session goes on. Tokens that are stored already are shared.

        chunk: store what stands behind the tokens that it was opened on as a chunk, which may stand anywhere. durability: what
        the context outlives, None for the configuration's. Raises AlreadyExists, InvalidArgument, PositionError or CapacityError,
        Unsupported for a chunk of a model whose keys cannot be moved and for a durability that cannot be had, and then nothing is
        stored.
        """
        level = self._catalog.durability(validate.durability(durability))
        self._catalog.check_free(validate.name(name))
        ids = session.ids(tokens)
        if chunk:
            return self._store_chunk(session, name, ids, level)
        if session.snapshot.overlay is not None:
            return self._store_laid_out(session, name, ids, level)
        views = self._catalog.match(session.spec, ids)
        if visible_tokens(views) < session.reused:  # the contexts this session was opened on were dropped meanwhile
            release_views(views)
            views = session.snapshot.share().views
        stored = visible_tokens(views)
        try:
            tables = _tail_tables(session, stored) if stored < len(ids) else []
        except CapacityError:
            release_views(views)
            raise
        new = NewSegment(ids[stored:], tables, stored, self._queries_of(session))
        return self.publish(session.spec, name, views, new, level)

    def publish(self, spec: ModelSpec, name: str, views: Views, new: NewSegment, durability: str) -> ContextInfo:
        """Make a context of the views and, behind them, a new segment, if it has any tokens. durability: what it outlives.

        Takes over the references to the views and the new segment, also when it raises AlreadyExists or CapacityError.
        """
        if len(new.tokens):
            views = self._extended(views, new, standalone=not new.base)
        else:
            new.release()
        return self._publish(Context(name, spec, Layout.contiguous(views), concatenate(views), durability=durability))

    def publish_chunk(self, spec: ModelSpec, name: str, views: Views, new: NewSegment, durability: str) -> ContextInfo:
        """Make a chunk of the stored segment that `views` show, or of a new one. If its text was stored meanwhile, it becomes
        another name for what is stored. durability: what it outlives.

        Takes over the references to the views and the new segment, which is empty where views are given, also when it raises
        AlreadyExists or CapacityError.
        """
        tokens = views[0].segment.tokens if views else new.tokens
        views = views or self.chunk_views(spec, tokens)
        if views:
            new.release()
        else:
            views = (new.view(self.budget, standalone=True, shift=-new.base),)
        return self._publish(Context(name, spec, Layout.contiguous(views), tokens, durability=durability))

    def chunk_views(self, spec: ModelSpec, tokens: Tokens) -> Views:
        """The stored chunk of exactly these tokens, if there is one; the caller owns a reference to it."""
        segment = self._catalog.chunk(spec, tokens)
        return () if segment is None else (SegmentView(segment, len(tokens), -segment.base),)

    def _extended(self, views: Views, new: NewSegment, *, standalone: bool) -> Views:
        """The views and a new segment behind them. Raises CapacityError, and then everything was released."""
        with ExitStack() as undo:
            undo.callback(release_views, views)
            extended = (*views, new.view(self.budget, standalone=standalone))
            undo.pop_all()
        return extended

    def _publish(self, context: Context) -> ContextInfo:
        """Take over a context and have its indexes built. Raises AlreadyExists or CapacityError, and then it is released."""
        published = False
        try:
            context = replace(context, beside=Reservation(self.budget, context_nbytes(len(context.tokens))))
            context = self._catalog.publish(context)
            published = True
        finally:
            if not published:
                context.release()
        self._advisor.published(context.views)
        return context.info()

    def _store_chunk(self, session: StorableSession, name: str, ids: Tokens, durability: str) -> ContextInfo:
        base = session.start
        if base and session.snapshot.overlay is not None:
            raise InvalidArgument("the session was laid out of parts; a chunk comes from a session opened on tokens, or on none")
        if len(ids) == base:
            raise InvalidArgument(f"the session holds nothing behind the {base} tokens that it was opened on; expected a chunk")
        inverse_frequencies(session.spec.rope, session.spec.head_dim)
        tables = _tail_tables(session, base)
        new = NewSegment(ids[base:], tables, base, self._queries_of(session))
        return self.publish_chunk(session.spec, name, (), new, durability)

    def _store_laid_out(self, session: StorableSession, name: str, ids: Tokens, durability: str) -> ContextInfo:
        """Store a blended session: its layout and overlay, and behind them its tail as a segment that is exact only there."""
        tables = _tail_tables(session, session.start) if session.start < len(ids) else []
        snapshot = session.snapshot.share()
        views = snapshot.views
        if tables:
            new = NewSegment(ids[session.start :], tables, session.start, self._queries_of(session))
            with ExitStack() as undo:
                if snapshot.overlay is not None:
                    undo.callback(snapshot.overlay.release)
                views = self._extended(views, new, standalone=False)
                undo.pop_all()
        laid = Layout(views, len(ids))
        return self._publish(Context(name, session.spec, laid, ids, snapshot.overlay, durability=durability))

    def _queries_of(self, session: StorableSession) -> StoredQueries:
        """Some queries of the session, if there is room for them: they help indexes, but only the tokens must be kept."""
        return StoredQueries.as_far_as_they_fit(self.budget, session.query_samples())


def _tail_tables(session: StorableSession, start: int) -> list[BlockTable]:
    """The tables of a session's own tokens from position `start` on, one a layer. Raises CapacityError."""
    tables: list[BlockTable] = []
    try:
        for tail in session.tails:
            tables.append(tail.suffix(start - session.start))
    except CapacityError:
        for table in tables:
            table.release()
        raise
    return tables
