"""One database in this process. `kvdb.connect` wraps it for users, `kvdb serve` offers it over gRPC."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

import kvdb.catalog.contexts.residency as residency
import kvdb.catalog.durable.check as context_check
import kvdb.deadlines as deadlines
import kvdb.forks as forks
import kvdb.indexing.status as status
import kvdb.session.step as steps
import kvdb.validate as validate
from kvdb.blend.rope_shift import check_movable
from kvdb.catalog.compaction.space import space_of
from kvdb.catalog.layout_builder import build_layout
from kvdb.catalog.segments.overlay import Overlay
from kvdb.catalog.segments.segment_view import Views, release_views, visible_tokens
from kvdb.catalog.segments.servable import servable
from kvdb.catalog.segments.snapshot import Snapshot
from kvdb.config import Config, checked
from kvdb.database.components import Components
from kvdb.errors import IntegrityError, InvalidArgument, KvdbError, NotFound, SessionClosed
from kvdb.events import Kind
from kvdb.indexing.database_status import database_status
from kvdb.ingest.import_writer import ImportTarget, ImportWriter
from kvdb.ingest.publisher import NewContext
from kvdb.session.each import attempted, check_counts
from kvdb.session.open_handles import counted_call
from kvdb.session.runner import Starts
from kvdb.session.sharing import SharedSessions
from kvdb.session.state import SessionState
from kvdb.session.terms import SessionTerms
from kvdb.storage.store import Owners
from kvdb.types import (
    DEFAULT_RETENTION,
    Activity,
    Array,
    BackedUp,
    CallTimings,
    Checked,
    ContextInfo,
    ContextStatistics,
    ContextUpdate,
    DatabaseStatus,
    Dropped,
    IndexInfo,
    KeysValues,
    ModelSpec,
    PrefixMatch,
    PromptPart,
    Retention,
    SessionInfo,
    Space,
    TierStats,
    Tokens,
    UnknownFile,
    ViewInfo,
)
from query_optimizer.custom_rules import PlacedRule
from query_optimizer.plan import Plan
from query_optimizer.query_options import QueryOptions, checked_error_max

# size: one noun, a database and its calls


class Database:
    """Contexts, their segments, and the sessions over them. Thread-safe."""

    last_timings: CallTimings | None = None

    def __init__(self, config: Config | None = None, rules: Sequence[PlacedRule] = ()) -> None:
        """rules: added to those of the optimizer. A number of threads in the configuration is the process's from now on. Raises
        what `Components` raises."""
        self.config = checked(config)
        self._components = made = Components(self.config, rules)
        self.optimizer, self.machine, self.gpu = made.optimizer, made.machine, made.gpu
        self.events, self.handles = made.events, made.handles
        self._blocks, self._catalog, self._builder, self._advisor = made.blocks, made.catalog, made.builder, made.advisor
        self._compactor, self._publisher, self._services = made.compactor, made.publisher, made.services
        self._shared = SharedSessions()
        self._opened = monotonic()
        forks.stays_behind(self, *forks.DATABASE)

    @counted_call
    def begin_import(
        self,
        spec: ModelSpec,
        tokens: Tokens,
        name: str,
        base: int | None = None,
        retention: Retention = DEFAULT_RETENTION,
        salt: str = "",
    ) -> ImportWriter:
        """Start storing a context. Only the tokens behind the longest stored prefix, [import.start, n), are to be written.

        base: for a chunk, the position at which its first token was computed, None for a prefix. A chunk is stored whole or, if
        its text is stored already, not at all. retention: how long the context is kept. salt: what
        lookups have to say beside the tokens; nothing is shared between two. Raises AlreadyExists, InvalidArgument, or
        Unsupported for a chunk of a model whose keys cannot be moved and for a durability that cannot be had."""
        kept = self._publisher.retention(retention)
        self._catalog.drop_expired()
        self._catalog.check_free(validate.name(name))
        ids = validate.token_ids(tokens)
        if not len(ids):
            raise InvalidArgument(f"context {name!r} has no tokens; expected at least one")
        if base is not None:
            validate.base(base)
            check_movable(spec)
            views = self._publisher.chunk_views(spec, ids, validate.salt(salt))
        else:
            views = self._catalog.match(spec, ids, validate.salt(salt))
        self._catalog.use(views)
        target = ImportTarget(NewContext(spec, name, kept, salt), ids, base)
        return ImportWriter(self.handles, self._publisher, target, views, self._blocks.tables(spec))

    @counted_call
    def status(self) -> DatabaseStatus:
        """How the database is used at the moment. It takes time with the number of contexts."""
        return database_status(self, self.activity().sessions_open, self.uptime_seconds)

    @property
    def uptime_seconds(self) -> float:
        """How long it has been open."""
        return monotonic() - self._opened

    def create_session(
        self,
        spec: ModelSpec,
        tokens: Tokens,
        error_max: float | None = None,
        salt: str = "",
        *,
        share: bool = False,
        label: str = "",
        expected_tokens: int | None = None,
    ) -> SessionState:
        """A session over the longest stored prefix of `tokens`; `session.reused` says how many of them need no prefill.

        error_max: of its queries that name nothing, None for the configuration's. salt: as in `begin_import`. share:
        whether sessions that are created later may stand on what this one holds of its tokens. label: see `sessions`.
        expected_tokens: as in `kvdb.Client.create_session`. Raises
        ShapeError, DtypeError or InvalidArgument for tokens that are no ids, and an error_max that cannot be."""
        budget = checked_error_max(error_max)
        ids = validate.token_ids(tokens)
        self._catalog.drop_expired()
        views = servable(spec, self._catalog.match(spec, ids, validate.salt(salt)))
        if spec.uniform:  # of windows and states a running session has what it needs itself, where it is
            views = self._shared.extended(spec, salt, ids, views)
        self._catalog.use(views)
        self._advisor.count_session(views)
        self._services.activity.count_prompt(len(ids), views)
        terms = SessionTerms(budget, salt, validate.expected_tokens(expected_tokens))
        session = SessionState(self._services, spec, Snapshot.prefix(views), self._blocks.tables(spec), ids, terms)
        session.label = validate.text("label", label)
        if share:
            self._shared.add(session)
        return session

    @counted_call
    def create_session_of_parts(
        self,
        spec: ModelSpec,
        parts: Sequence[PromptPart],
        error_max: float | None = None,
        salt: str = "",
        others: Collection[str] = (),
        *,
        expected_tokens: int | None = None,
    ) -> SessionState:
        """A session over several parts, in their order: contexts by name, chunks anywhere, and token ids.

        Token ids before the last context are gaps, whose KV comes with `overlay`; ids behind it are not laid out. error_max,
        salt, expected_tokens: as in `create_session`. others: salts beside it under which contexts may be stored. Raises
        NotFound, SpecMismatch, PositionError, InvalidArgument, ShapeError, DtypeError, or Unsupported where keys cannot be
        moved."""
        budget = checked_error_max(error_max)
        self._catalog.drop_expired()
        laid = build_layout(self._catalog, spec, parts, validate.salt(salt), others)
        self._catalog.use(laid.layout.views)
        overlay = laid.overlay or Overlay(self._blocks.tables(spec))
        snapshot = Snapshot.blended(spec, laid.layout, overlay)
        self._advisor.count_session(laid.layout.views)
        terms = SessionTerms(budget, salt, validate.expected_tokens(expected_tokens))
        return SessionState(self._services, spec, snapshot, self._blocks.tables(spec), laid.tokens, terms)

    @counted_call
    def attend(
        self, sessions: Sequence[object], layer: int, q: Array, k: Array, v: Array, options: QueryOptions, starts: Starts = None
    ) -> Array:
        """One step of several of its sessions; see `kvdb.session.step.answer`. Raises InvalidArgument for a session of another
        database."""
        return steps.answer(self._own(sessions), layer, q, k, v, options, starts)

    @counted_call
    def step(
        self, sessions: Sequence[object], layer: int, q: Any, k: Any, v: Any, options: QueryOptions, starts: Starts = None
    ) -> Any | None:
        """`attend` on the GPU alone; see `kvdb.session.step.run`. Raises InvalidArgument as `attend` does."""
        return None if self.gpu is None else steps.run(self._own(sessions), layer, q, k, v, options, starts)

    @counted_call
    def attention(self, sessions: Sequence[object], layer: int, q: Array, options: QueryOptions) -> Array:
        """A query of several of its sessions; see `kvdb.session.step.attention_of_all`. Raises InvalidArgument for a session of
        another database."""
        return steps.attention_of_all(self._own(sessions), layer, q, options)

    @counted_call
    def compact(self) -> int:
        """Give back the space of tokens that no context names, and of blocks that are hardly filled, also of segments that had to
        be loaded from disk for it; queries go on meanwhile. Returns the bytes of blocks that were given back. Raises
        Unavailable, and IntegrityError for a segment on disk that was changed."""
        before = self._blocks.used_nbytes()
        self._compactor.compact()
        return max(0, before - self._blocks.used_nbytes())

    def wait_for_builds(self, timeout: float | None = None) -> bool:
        """Wait until no index is being built or waits to be built. Returns False if that takes more than `timeout` seconds; None
        waits for any time."""
        return self._builder.wait(timeout)

    def close(self) -> None:
        """Close every session and give all memory back, once the calls under way have ended. Closing twice does nothing.

        New calls raise Unavailable, and those on sessions SessionClosed.
        """
        if self.handles.refuse():
            self._components.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @counted_call
    def contexts(
        self, prefix: str = "", limit: int | None = None, after: str = "", metadata: Mapping[str, Any] | None = None
    ) -> list[ContextInfo]:
        """The contexts in the order of their names: those that begin with `prefix` and come behind `after`, at most `limit`.
        metadata: only those of which all of it is noted."""
        self._catalog.drop_expired()
        return [context.info() for context in self._catalog.contexts(prefix, limit, after, metadata or {})]

    @counted_call
    def match(self, spec: ModelSpec, tokens: Tokens, salt: str = "") -> PrefixMatch:
        """How many leading tokens are stored, and in which tier, without opening a session. salt: as in `create_session`. Raises
        what `create_session` raises for tokens that are no ids."""
        views = servable(spec, self._catalog.match(spec, validate.token_ids(tokens), validate.salt(salt)))
        try:
            resident = sum(view.visible for view in views if view.segment.resident)
            return PrefixMatch(visible_tokens(views), resident)
        finally:
            release_views(views)

    @counted_call
    def token_ids(self, name: str) -> Tokens:
        """The ids of all tokens of a context, int32 `[n]`. Raises NotFound."""
        return self._catalog.get(name).tokens

    @counted_call
    def get(self, name: str) -> ContextInfo:
        """Raises NotFound."""
        self._catalog.drop_expired()
        return self._catalog.get(name).info()

    @counted_call
    def is_shared(self, name: str, tenant: str) -> bool:
        """Whether a context is shared with that tenant of a server, which one that is not there is not."""
        return (context := self._catalog.peek(name)) is not None and tenant in context.life.shared_with

    @counted_call
    def has(self, name: str) -> bool:
        """Whether there is a context of that name."""
        return self._catalog.peek(name) is not None

    @counted_call
    def count_contexts(self) -> int:
        """How many contexts are stored."""
        self._catalog.drop_expired()
        return self._catalog.count

    @counted_call
    def views(self, name: str) -> list[ViewInfo]:
        """What a context sees of its segments, in their order. Raises NotFound."""
        return self._catalog.get(name).view_infos()

    @counted_call
    def update(self, name: str, change: ContextUpdate) -> ContextInfo:
        """Change how long a context is kept, what is noted of it, who may read it, or its name. Returns what it is then. Raises
        NotFound, AlreadyExists for a name that is taken, and CapacityError or Unavailable where a store cannot write it."""
        self._catalog.drop_expired()
        return self._catalog.update(name, change).info()

    @counted_call
    def rename(self, name: str, new: str) -> ContextInfo:
        """Give a context another name. Raises what `update` raises."""
        return self.update(name, ContextUpdate(name=validate.name(new)))

    @counted_call
    def drop(self, *names: str) -> Dropped:
        """Forget contexts, all or none, and give back the space of what nobody sees any more. Open sessions over them go on.
        Returns their names. Raises NotFound."""
        self._catalog.drop(*names)
        for name in names:
            self._catalog.events.tell(Kind.DROPPED, context=name)
        self._compactor.settle()
        return Dropped(names, ())

    @counted_call
    def drop_all(self, prefix: str, metadata: Mapping[str, Any]) -> Dropped:
        """Forget the contexts whose names begin with `prefix` and of which all of `metadata` is noted, but for those all of
        which a session or an import stands on. Raises what `drop` raises, and then none is forgotten."""
        while True:
            found = self._catalog.contexts(prefix, metadata=metadata)
            seen = self.handles.seen()
            in_use = tuple(context.name for context in found if context.ends_in(seen))
            names = tuple(context.name for context in found if context.name not in in_use)
            with suppress(NotFound):  # somebody dropped one meanwhile
                self.drop(*names)
                return Dropped(names, in_use)

    @counted_call
    def tiers(self) -> list[TierStats]:
        """What each tier holds, one entry for each size of block."""
        return self._blocks.stats()

    def tier_limits(self) -> dict[str, int]:
        """The most bytes that a tier may take, by its name, of those that have a limit."""
        storage = self.config.storage
        limits = {"gpu": storage.gpu_bytes_max or None, "cpu": storage.cpu_bytes_max, "disk": storage.disk_bytes_max}
        return {tier: most for tier, most in limits.items() if most is not None}

    @counted_call
    def disk_nbytes(self, names: Iterable[str]) -> int:
        """How many bytes these contexts have on disk; what they share counts for each."""
        views = [view for name in names if (context := self._catalog.peek(name)) is not None for view in context.views]
        return sum(view.segment.nbytes for view in views if view.segment.place is not None)

    @counted_call
    def goes_to_disk(self, retention: Retention) -> bool:
        """Whether a context that is stored so is written to disk. Raises Unsupported."""
        return self._catalog.retention(retention).durability != "memory"

    @counted_call
    def offload(self, name: str) -> int:
        """Move a context's segments to disk, once compaction in the background has made those that it will see; see
        `residency.offload`. Raises NotFound too."""
        self._compactor.wait()
        with self._catalog.borrow(name) as context:
            left = residency.offload(context, self._blocks)
        self._catalog.events.tell(Kind.OFFLOADED, context=name, bytes=left)
        return left

    @counted_call
    def statistics(self, name: str) -> ContextStatistics:
        """Statistics of the queries that searched a context. Raises NotFound."""
        return self._catalog.get(name).statistics()

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
    def explain(self, name: str, layer: int | None, options: QueryOptions, analyze: bool) -> list[Plan]:
        """The plans of a query by one more token behind a context, for one layer or for each. analyze: whether to carry them out,
        with queries that were kept when the context was stored. Raises NotFound, LayerError or InvalidArgument."""
        with closing(self.open_context(name)) as session:
            for view in session.views:
                session.set_last_queries(view.segment.indexes.queries)
            layers = session.spec.attending if layer is None else [layer]
            return [session.explain(number, options, analyze) for number in deadlines.each(layers)]

    @counted_call
    def open_context(self, name: str, tokens: int | None = None) -> SessionState:
        """A session over what a context holds. tokens: only over so many of its first tokens, so that no segment behind them is
        brought back from disk. Raises NotFound, CapacityError or Unavailable."""
        context = self._catalog.acquire(name)
        if context.plain:
            snapshot = Snapshot.prefix(context.views)
        else:
            overlay = context.overlay or Overlay(self._blocks.tables(context.spec))
            snapshot = Snapshot.blended(context.spec, context.layout, overlay)
        if tokens is not None and tokens < snapshot.layout.length:
            with ExitStack() as whole:
                whole.callback(snapshot.release)
                snapshot = snapshot.cut(tokens)
        tails = self._blocks.tables(context.spec)
        return SessionState(self._services, context.spec, snapshot, tails, context.tokens, SessionTerms(salt=context.salt))

    @counted_call
    def read(
        self,
        name: str,
        layers: Sequence[int],
        start: int,
        stop: int | None = None,
        out: Sequence[KeysValues] | None = None,
        *,
        indexer: bool = False,
    ) -> list[KeysValues]:
        """KV of a context's tokens [start, stop), None for all behind `start`; see `kvdb.session.state.SessionState.read`, whose
        errors it raises, and those of `open_context`."""
        with closing(self.open_context(name, stop)) as session:
            return session.read(layers, start, stop, out, indexer=indexer)

    @counted_call
    def store(self, session: SessionState, name: str, tokens: Tokens | None, *, chunk: bool, retention: Retention) -> ContextInfo:
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
        return self._services.activity.totals()

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
        layers = found[-1].spec.attending if layer is None else [layer]
        return [found[-1].explain(number, options, analyze) for number in deadlines.each(layers)]

    @counted_call
    def create_sessions(
        self,
        spec: ModelSpec,
        prompts: Sequence[Tokens],
        error_max: float | None = None,
        salt: str = "",
        *,
        expected_tokens: int | None = None,
    ) -> list[SessionState]:
        """A session for each prompt, see `kvdb.database.Database.create_session`; all or none. Raises what that raises."""
        with ExitStack() as undo:
            sessions = []
            for i, tokens in enumerate(deadlines.each(prompts)):
                with validate.numbered(i):
                    sessions.append(self.create_session(spec, tokens, error_max, salt, expected_tokens=expected_tokens))
                undo.callback(sessions[-1].close)
            undo.pop_all()
        return sessions

    @counted_call
    def update_sessions(
        self, sessions: Sequence[object], layer: int, k: Array, v: Array, starts: Sequence[int] | None = None
    ) -> list[KvdbError | None]:
        """`SessionState.update` of each session; k, v: `[sessions, kv_heads, n, head_dim]`. Returns None for each that was done,
        and the error of the others. Raises InvalidArgument or ShapeError, and then nothing was done."""
        own = self._own(sessions)
        validate.starts(starts, len(own))
        for what, array in (("k", k), ("v", v)):
            validate.stacked(what, array, len(own))
        first = [None] * len(own) if starts is None else starts
        return [attempted(lambda i=i: own[i].update(layer, k[i], v[i], first[i])) for i in range(len(own))]  # type: ignore[misc]

    @counted_call
    def truncate_sessions(self, sessions: Sequence[object], tokens: Sequence[int]) -> list[KvdbError | None]:
        """`SessionState.truncate` of each session to its number of tokens. Returns None for each that was done, and the error of
        the others. Raises InvalidArgument, and then nothing was done."""
        own = self._own(sessions)
        check_counts(tokens, len(own))
        return [attempted(lambda i=i: own[i].truncate(tokens[i])) for i in range(len(own))]  # type: ignore[misc]

    @counted_call
    def close_sessions(self, sessions: Sequence[object]) -> None:
        """Close each session. Raises InvalidArgument for a session of another database; then none is closed."""
        for session in self._own(sessions):
            session.close()

    @counted_call
    def verify(self, name: str) -> Checked:
        """Read everything that is on disk of a context, and compare it with its checksums, and indexes in memory with their keys.
        Raises NotFound, IntegrityError, Unavailable, and CapacityError where the keys of such an index find no room."""
        with self._catalog.borrow(name) as context, self._damage_told():
            disk = self._blocks.disk
            checked = Checked(0, 0, 0) if disk is None else context_check.check(context, disk)
            indexed = tuple(view for view in context.views if view.segment.indexes.built())
            with residency.pinned(indexed, self._blocks.loader):
                return replace(checked, indexes=max(checked.indexes, status.verify(indexed)))

    @counted_call
    def verify_store(self) -> list[str]:
        """Prove what `check_integrity` proves. Returns the names of contexts that were found damaged when the store was opened.
        Raises IntegrityError."""
        self.check_integrity()
        return self._catalog.damaged()

    @counted_call
    def space(self, prefix: str = "") -> Space:
        """How much space the stored contexts take whose names begin with `prefix`. It takes time with their number."""
        with ExitStack() as held:
            borrowed = []
            for context in self._catalog.contexts(prefix):
                with suppress(NotFound):  # it was dropped meanwhile
                    borrowed.append(held.enter_context(self._catalog.borrow(context.name)))
            return space_of(borrowed)

    @counted_call
    def backup(self, folder: str, link: bool = False) -> BackedUp:
        """Copy the store to a new folder, or an empty one, which is a store then, while sessions and imports go on, and read the
        copies. link: make hard links to files that are never written again. What is in memory only is left out.

        Raises InvalidArgument for a folder that is not empty and for links that cannot be, Unsupported for a database without a
        store, IntegrityError, CapacityError and Unavailable; then the folder is no store.
        """
        return self._catalog.backup(Path(folder), link=link)

    @counted_call
    def unknown_files(self, remove: bool = False) -> list[UnknownFile]:
        """The files of the store's segments that its catalogue did not know when it was opened. remove: remove them. Raises
        IntegrityError where they may be of contexts that were damaged, and Unavailable where one cannot be removed."""
        return self._catalog.unknown_files(remove=remove)

    def check_integrity(self) -> None:
        """Prove that free and used blocks add up and that every reference has its owner, as every file. Raises IntegrityError.

        Call it while no session or import is being written; builds of indexes may go on, and contexts be dropped.
        """
        self._blocks.check_integrity(self._owners)

    def _own(self, sessions: Sequence[object]) -> list[SessionState]:
        own = [session for session in sessions if isinstance(session, SessionState) and session.services is self._services]
        validate.together(sessions, own)
        return own

    def _long(self, views: Views) -> Views:
        """The views whose segments are long enough for an index."""
        return tuple(view for view in views if len(view.segment) >= self.config.indexes.segment_tokens_min)

    def _open(self) -> list[SessionState]:
        return [handle for handle in self.handles.open() if isinstance(handle, SessionState)]

    def _labelled(self) -> list[SessionState]:
        return [session for session in self._open() if session.label]

    @contextmanager
    def _damage_told(self) -> Iterator[None]:
        """Tell of what the body finds damaged."""
        try:
            yield
        except IntegrityError as error:
            self._catalog.events.tell(Kind.CHECKSUM_FAILED, what=str(error))
            raise

    def _owners(self) -> Owners:
        tables, stored = self.handles.owners(self._catalog.alive(), self._components.held_segments())
        return Owners(tables, stored, None if self.gpu is None else self.gpu.owned())
