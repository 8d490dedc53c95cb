"""Makes contexts out of imports, and out of sessions that are stored."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import kvdb.validate as validate
from kvdb.blend.rope_shift import check_movable
from kvdb.catalog.catalog import Catalog
from kvdb.catalog.contexts.context import StoredContext
from kvdb.catalog.contexts.life import Life
from kvdb.catalog.contexts.prefix_tree import concatenate
from kvdb.catalog.segments.layout import ContextLayout
from kvdb.catalog.segments.overhead import context_nbytes
from kvdb.catalog.segments.overlay import Overlay
from kvdb.catalog.segments.packed_ids import PackedIds
from kvdb.catalog.segments.segment_view import SegmentView, Views, release_views, visible_tokens
from kvdb.catalog.segments.states import StateSnapshot
from kvdb.catalog.segments.stored_queries import StoredQueries
from kvdb.errors import CapacityError, InvalidArgument
from kvdb.events import Kind
from kvdb.indexing.advisor import IndexAdvisor
from kvdb.ingest.compactor import Compactor
from kvdb.ingest.early_file import EarlyFile
from kvdb.ingest.new_segment import NewSegment
from kvdb.session.services import StorableSession
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import Reservation
from kvdb.storage.store import BlockStore
from kvdb.types import DEFAULT_RETENTION, ContextInfo, ModelSpec, Retention, Tokens

NO_STATES: Mapping[int, StateSnapshot] = MappingProxyType({})


class NewContext(NamedTuple):
    """What a context is to be beside what it holds. retention: of a durability that can be had. salt: what a lookup has to say to
    find it."""

    spec: ModelSpec
    name: str
    retention: Retention
    salt: str = ""

    def of(self, layout: ContextLayout, tokens: Tokens, overlay: Overlay | None = None) -> StoredContext:
        """The context, which holds this."""
        ids = None if visible_tokens(layout.views) == layout.length else PackedIds(tokens)
        life, durability = Life.begun(self.retention), self.retention.durability or "memory"
        return StoredContext(self.name, self.spec, layout, ids, overlay, life=life, durability=durability, salt=self.salt)


class Publisher:
    """Makes contexts of tokens and blocks. The catalogue is told last, so that a failure before leaves nothing visible.

    budget: the budget of main memory, in which stored queries count. advisor: told about each new context. compactor: asked
    afterwards to give back what is held in vain.
    """

    def __init__(self, catalog: Catalog, blocks: BlockStore, advisor: IndexAdvisor, compactor: Compactor) -> None:
        self.budget = blocks.budget
        self._blocks = blocks
        self._catalog = catalog
        self._advisor = advisor
        self._compactor = compactor

    def retention(self, asked: Retention) -> Retention:
        """What the caller asks of a new context, with what it will have where that is left open. Raises InvalidArgument for what
        cannot be, Unsupported for a durability that cannot be had."""
        kept = self._catalog.retention(validate.retention(asked))
        return replace(kept, format=self._blocks.format_of(kept.format))

    def store(
        self,
        session: StorableSession,
        name: str,
        tokens: Tokens | None,
        *,
        chunk: bool = False,
        retention: Retention = DEFAULT_RETENTION,
    ) -> ContextInfo:
        """Store a session's tokens as a context; the session goes on. Tokens that are stored already are shared.

        chunk: store what stands behind the tokens that it was opened on as a chunk, which may stand anywhere. retention: how
        long the context is kept. Raises AlreadyExists, InvalidArgument, PositionError or CapacityError,
        Unsupported for a chunk of a model whose keys cannot be moved and for a durability that cannot be had, and then nothing is
        stored.
        """
        kept = self.retention(retention)
        self._catalog.check_free(validate.name(name))
        ids = session.ids(tokens)
        context = NewContext(session.spec, name, kept, session.salt)
        if chunk:
            return self._store_chunk(session, context, ids)
        if session.snapshot.overlay is not None:
            return self._store_laid_out(session, context, ids)
        views = self._catalog.match(session.spec, ids, session.salt)
        if visible_tokens(views) < session.reused:  # the contexts this session was opened on were dropped meanwhile
            release_views(views)
            views = session.snapshot.share().views
        if visible_tokens(views) < len(ids):
            views = self._without_short_end(session, views)
        stored = visible_tokens(views)
        try:
            tables = _tail_tables(session, stored) if stored < len(ids) else []
        except CapacityError:
            release_views(views)
            raise
        new = NewSegment(ids[stored:], tables, stored, self._queries_of(session))
        return self.publish(context, views, new, session.states.snapshots())

    def early_file(self, context: NewContext, tokens: int) -> EarlyFile | None:
        """The file of a context's new segment of so many tokens, to be written while these come. None where nothing is to be
        written before the database ends."""
        disk, durability = self._blocks.disk, context.retention.durability or "memory"
        if disk is None or not self._catalog.on_disk or durability == "memory":
            return None
        return EarlyFile(disk, context.spec.digest, tokens, synced=durability != "os")

    def publish(
        self, context: NewContext, views: Views, new: NewSegment, states: Mapping[int, StateSnapshot] = NO_STATES
    ) -> ContextInfo:
        """Make a context of the views and, behind them, a new segment, if it has any tokens. states: of some of its positions,
        which its segments keep from now on.

        Takes over the references to the views and the new segment, also when it raises AlreadyExists or CapacityError.
        """
        if len(new.tokens):
            views = self._extended(context, views, new, standalone=not new.base)
        else:
            new.release()
        with ExitStack() as undo:
            undo.callback(release_views, views)
            for view in views:
                for position in sorted(states):
                    if view.begin < position <= view.end:
                        view.segment.states.put(position - view.begin, states[position])
            undo.pop_all()
        return self._publish(context.of(ContextLayout.contiguous(views), concatenate(views)))

    def publish_chunk(self, context: NewContext, views: Views, new: NewSegment) -> ContextInfo:
        """Make a chunk of the stored segment that `views` show, or of a new one. If its text was stored meanwhile, it becomes
        another name for what is stored.

        Takes over the references to the views and the new segment, which is empty where views are given, also when it raises
        AlreadyExists or CapacityError.
        """
        tokens = concatenate(views) if views else new.tokens
        views = views or self.chunk_views(context.spec, tokens, context.salt)
        if views:
            new.release()
        else:
            views = (self._encoded(context, new, standalone=True, shift=-new.base),)
        return self._publish(context.of(ContextLayout.contiguous(views), tokens))

    def chunk_views(self, spec: ModelSpec, tokens: Tokens, salt: str) -> Views:
        """The chunk of exactly these tokens that is stored under that salt, if there is one; the caller owns a reference to
        it."""
        views = self._catalog.chunk(spec, tokens, salt)
        return tuple(replace(view, shift=-views[0].segment.base) for view in views)

    def encode(self, context: NewContext, tables: list[BlockTable], layer: int) -> None:
        """Have a layer of a context's new segment scored and brought into its format, if it is not yet. Raises CapacityError and
        InvalidArgument; then it is as it was."""
        self._blocks.encode(tables, layer, context.retention.format or "")

    def _encoded(self, context: NewContext, new: NewSegment, *, standalone: bool, shift: int = 0) -> SegmentView:
        """All of a context's new segment, in its format. Raises CapacityError or InvalidArgument, and then everything was given
        back."""
        with ExitStack() as undo:
            undo.callback(new.release)
            for layer in range(len(new.tables)):
                self.encode(context, new.tables, layer)
            undo.pop_all()
        return new.view(self.budget, standalone=standalone, shift=shift)

    def _extended(self, context: NewContext, views: Views, new: NewSegment, *, standalone: bool) -> Views:
        """The views and a new segment behind them. Raises CapacityError, and then everything was released."""
        with ExitStack() as undo:
            undo.callback(release_views, views)
            extended = (*views, self._encoded(context, new, standalone=standalone))
            undo.pop_all()
        return extended

    def _publish(self, context: StoredContext) -> ContextInfo:
        """Take over a context and have its indexes built. Raises AlreadyExists or CapacityError, and then it is released."""
        published = False
        try:
            context = replace(context, beside=Reservation(self.budget, context_nbytes(context.kept_ids)))
            context = self._catalog.publish(context)
            published = True
        finally:
            if not published:
                context.release()
        tokens = context.layout.length
        self._catalog.events.tell(Kind.STORED, context=context.name, tokens=tokens, segments=len(context.views))
        self._advisor.published(context.views)
        self._compactor.settle()
        return context.info()

    def _without_short_end(self, session: StorableSession, views: Views) -> Views:
        """The views without segments at their end that the session wrote and stored before, if the new segment had better hold
        their tokens too: they lie in the session's own blocks, which it shares. Such a segment ends in the middle of a block,
        nobody sees more of it, and nothing is known of it that would be lost."""
        if self._catalog.on_disk:  # a file would be written anew each time; the compactor merges many at once
            return views
        size = session.tails[0].layout.block_size
        while views and views[-1].begin >= session.start:
            last = views[-1]
            if last.segment.indexes.kinds or last.segment.evidence.version or last.segment.states.positions:
                break
            begin, end = last.begin - session.start, last.end - session.start
            if end % size == 0 or begin % size or not self._catalog.ends_at(session.spec, session.salt, views):
                break
            release_views(views[-1:])
            views = views[:-1]
        return views

    def _store_chunk(self, session: StorableSession, context: NewContext, ids: Tokens) -> ContextInfo:
        base = session.start
        if base and session.snapshot.overlay is not None:
            raise InvalidArgument("the session was laid out of parts; a chunk comes from a session opened on tokens, or on none")
        if len(ids) == base:
            raise InvalidArgument(f"the session holds nothing behind the {base} tokens that it was opened on; expected a chunk")
        check_movable(session.spec)
        tables = _tail_tables(session, base)
        new = NewSegment(ids[base:], tables, base, self._queries_of(session))
        return self.publish_chunk(context, (), new)

    def _store_laid_out(self, session: StorableSession, context: NewContext, ids: Tokens) -> ContextInfo:
        """Store a blended session: its layout and overlay, and behind them its tail as a segment that is exact only there."""
        tables = _tail_tables(session, session.start) if session.start < len(ids) else []
        snapshot = session.snapshot.share()
        views = snapshot.views
        if tables:
            new = NewSegment(ids[session.start :], tables, session.start, self._queries_of(session))
            with ExitStack() as undo:
                if snapshot.overlay is not None:
                    undo.callback(snapshot.overlay.release)
                views = self._extended(context, views, new, standalone=False)
                undo.pop_all()
        return self._publish(context.of(ContextLayout(views, len(ids)), ids, snapshot.overlay))

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
