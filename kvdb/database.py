"""The engine: one database in this process. `kvdb.connect` wraps it for users, `kvdb serve` offers it over gRPC."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import indexes.registry as registry
import kvdb.batch as batch
import kvdb.check as check
import kvdb.indexing as indexing
import kvdb.machine as machine_file
import kvdb.tiering as tiering
from kvdb.basis import Basis
from kvdb.batch import Starts
from kvdb.blend.rope import inverse_frequencies
from kvdb.builder import IndexBuilder
from kvdb.catalog.catalog import Catalog, let_go
from kvdb.catalog.overlay import Overlay
from kvdb.catalog.segment import Segment, Views
from kvdb.catalog.use import Asked
from kvdb.config import Config
from kvdb.errors import ConfigError, InvalidArgument, Unavailable
from kvdb.gpu.opening import building, open_gpu, serving
from kvdb.gpu.side import GpuSide
from kvdb.imports import Import, Target
from kvdb.indexing import Materializer
from kvdb.laying import lay_out
from kvdb.opened import Opened
from kvdb.publishing import Publisher
from kvdb.session import SessionState
from kvdb.storage.store import BlockStore
from kvdb.types import Array, ContextInfo, ContextStatistics, IndexInfo, ModelSpec, Part, TierStats, Tokens
from query_optimizer.extend import BadRule, PlacedRule, extended
from query_optimizer.materialize import Materialize
from query_optimizer.optimizer import Optimizer, UnknownRule
from query_optimizer.plan import Plan
from query_optimizer.rules import base_rules
from query_optimizer.wanted import Wanted


class Database:
    """Contexts, their segments, and the sessions over them. Thread-safe."""

    def __init__(self, config: Config | None = None, rules: Sequence[PlacedRule] = ()) -> None:
        """rules: of the optimizer, beside its own. Raises ConfigError for a rule in the configuration that does not exist, or a
        GPU that does not or is too small, and InvalidArgument for a rule that cannot be added."""
        self.config = config or Config()
        try:
            base = base_rules(self.config.optimizer.short_context_tokens, self.config.indexes.on_demand)
            self.optimizer = Optimizer(extended(base, rules), self.config.optimizer.rules_off, by_name=bool(rules))
        except BadRule as error:
            raise InvalidArgument(f"rules: {error}") from None
        except UnknownRule as error:
            raise ConfigError(f"optimizer.rules_off: {error}") from None
        self.machine = machine_file.known(self.config.optimizer.machine_file).machine
        self._catalog = Catalog()
        device = open_gpu(self.config.storage)
        self._blocks = BlockStore(self.config.storage, device)
        self.gpu: GpuSide | None = serving(device, self._blocks, self.config.optimizer.machine_file)
        indexes = self.config.indexes
        self._builder = IndexBuilder(self._blocks.loader, indexes.threads, indexes.bytes_max, building(device))
        policy = Materialize(indexes.opened_often)
        self._materializer = Materializer(self._builder, policy, indexes.segment_tokens_min, automatic=indexes.automatic)
        self._publisher = Publisher(self._catalog, self._published)
        self._opened = Opened()
        self._open = True

    def begin_import(self, spec: ModelSpec, tokens: Tokens, name: str, base: int | None = None) -> Import:
        """Start storing a context. Only the tokens behind the longest stored prefix, [import.start, n), are to be written.

        base: of a chunk, the position at which its first token was computed; of its text all or nothing is stored. Raises
        AlreadyExists, InvalidArgument, or Unsupported for a chunk of a model whose keys cannot be moved.
        """
        self._check_open()
        self._catalog.check_free(check.name(name))
        ids = check.token_ids(tokens)
        if not len(ids):
            raise InvalidArgument(f"context {name!r} has no tokens; expected at least one")
        if base is not None:
            check.base(base)
            inverse_frequencies(spec.rope, spec.head_dim)
            views = self._publisher.chunk_views(spec, ids)
        else:
            views = self._catalog.match(spec, ids)
        writing = Import(self, self._publisher, Target(spec, ids, name, base), views, self._blocks.tables(spec))
        self._opened.add_import(writing)
        return writing

    def create_session(self, spec: ModelSpec, tokens: Tokens) -> SessionState:
        """A session over the longest stored prefix of `tokens`; `session.reused` says how many of them need no prefill.

        Raises ShapeError, DtypeError or InvalidArgument for tokens that are no ids.
        """
        self._check_open()
        ids = check.token_ids(tokens)
        views = self._catalog.match(spec, ids)
        self._materializer.opened(views)
        return SessionState(self, spec, Basis.prefix(views), self._blocks.tables(spec), ids)

    def lay_out(self, spec: ModelSpec, parts: Sequence[Part]) -> SessionState:
        """A session over several parts, in their order: contexts by name, chunks anywhere, and token ids.

        Token ids before the last context are gaps, whose KV comes with `overlay`; those behind it are not laid out. Raises
        NotFound, SpecMismatch, PositionError, InvalidArgument, ShapeError, DtypeError, or Unsupported where keys cannot be moved.
        """
        self._check_open()
        laid = lay_out(self._catalog, spec, parts)
        overlay = laid.overlay or Overlay(self._blocks.tables(spec))
        basis = Basis.laid_out(spec, laid.layout, overlay)
        self._materializer.opened(laid.layout.views)
        return SessionState(self, spec, basis, self._blocks.tables(spec), laid.tokens)

    def attend_together(
        self, sessions: Sequence[object], layer: int, q: Array, k: Array, v: Array, wanted: Wanted, starts: Starts = None
    ) -> Array:
        """One step of several of its sessions; see `kvdb.batch.attend`, whose errors it raises, and InvalidArgument for a session
        that is not its own."""
        return batch.attend(self._own(sessions), layer, q, k, v, wanted, starts)

    def attention_together(self, sessions: Sequence[object], layer: int, q: Array, wanted: Wanted) -> Array:
        """A query of several of its sessions; see `kvdb.batch.attention`, and `attend_together`."""
        return batch.attention(self._own(sessions), layer, q, wanted)

    def store(self, session: SessionState, name: str, tokens: Tokens | None, *, chunk: bool = False) -> ContextInfo:
        """Keep a session's tokens as a context; see `Publisher.store`."""
        self._check_open()
        return self._publisher.store(session, name, tokens, chunk=chunk)

    def build_index(self, name: str, kind: str, wait: bool = True, wanted: Callable[[], bool] = lambda: True) -> list[IndexInfo]:
        """Build that kind of index over the segments of a context that are worth one; what there is then.

        wait: until it stands, or is no longer `wanted`; otherwise it is built in the background. Raises NotFound,
        InvalidArgument for a kind that does not exist, CapacityError where the indexes would keep more than indexes.bytes_max,
        Unsupported for a kind whose library is not installed, Unavailable, and what the build itself raised.
        """
        with self._held(name) as views:
            with tiering.kept_in(self._long(views), self._blocks.loader):
                builds = self._builder.want([view.segment for view in self._long(views)], kind)
            if wait:
                indexing.wait(builds, wanted)
            return indexing.infos(views)

    def indexes(self, name: str) -> list[IndexInfo]:
        """The indexes over the segments of a context. Raises NotFound."""
        with self._held(name) as views:
            return indexing.infos(views)

    def verify(self, name: str) -> int:
        """Check every index of a context against its keys; how many were checked. Raises NotFound or IntegrityError."""
        with self._held(name) as views:
            indexed = tuple(view for view in views if view.segment.indexes.built())
            with tiering.kept_in(indexed, self._blocks.loader):
                return indexing.verify(indexed)

    def explain(self, name: str, layer: int | None, wanted: Wanted, analyze: bool) -> list[Plan]:
        """The plans of a query of one token behind a context: of one layer, or of each. analyze: carry them out, for queries that
        were kept when it was stored. Raises NotFound, LayerError or InvalidArgument."""
        self._check_open()
        context = self._catalog.hold(name)
        if context.plain:
            basis = Basis.prefix(context.views)
        else:
            overlay = context.overlay or Overlay(self._blocks.tables(context.spec))
            basis = Basis.laid_out(context.spec, context.layout, overlay)
        session = SessionState(self, context.spec, basis, self._blocks.tables(context.spec), context.tokens)
        try:
            for view in context.views:
                session.suppose(view.segment.indexes.samples)
            layers = range(context.spec.layers) if layer is None else [layer]
            return [session.explain(number, wanted, analyze) for number in layers]
        finally:
            session.close()

    def statistics(self, name: str) -> ContextStatistics:
        """What queries were like that searched a context. Raises NotFound."""
        self._check_open()
        return self._catalog.get(name).statistics()

    def wish(self, segment: Segment, kind: str) -> None:
        """A plan would use an index of that kind; build it in the background, as the configuration says.

        Graphs take long to build, and wait until queries have shown that they pay.
        """
        config = self.config.indexes
        if kind not in registry.KINDS:  # a rule from outside may wish for anything
            return
        if self._open and (kind == config.on_demand or (config.automatic and not registry.kind(kind).walks)):
            self._builder.wish(segment, kind)

    def asked(self, segment: Segment, asked: Asked) -> None:
        """Queries were asked of a segment; build in the background what will pay."""
        if self._open:
            self._materializer.asked(segment, asked)

    def contexts(self) -> list[ContextInfo]:
        self._check_open()
        return [context.info() for context in self._catalog.contexts()]

    def get(self, name: str) -> ContextInfo:
        """Raises NotFound."""
        self._check_open()
        return self._catalog.get(name).info()

    def drop(self, name: str) -> None:
        """Forget a context. Open sessions over it go on; what nobody holds is freed. Raises NotFound."""
        self._check_open()
        self._catalog.drop(name)

    def tiers(self) -> list[TierStats]:
        """What each tier holds, one entry for each size of block."""
        self._check_open()
        return self._blocks.stats()

    def offload(self, name: str) -> int:
        """Move a context's segments to disk; see `tiering.offload`. Raises NotFound too."""
        self._check_open()
        context = self._catalog.hold(name)
        try:
            return tiering.offload(context, self._blocks)
        finally:
            let_go(context)

    def check_integrity(self) -> None:
        """Prove that free and used blocks add up and that every reference has its owner. Raises IntegrityError.

        Call it while no session or import is being written.
        """
        tables, files = self._opened.owners(self._catalog.contexts())
        self._blocks.check_integrity(tables, files, None if self.gpu is None else self.gpu.owned())

    def bring_in(self, views: Views) -> None:
        tiering.bring_in(views, self._blocks.loader)

    @property
    def load_rate(self) -> float | None:
        """Bytes a second lately from disk; None before any."""
        return self._blocks.loader.rate

    def opened(self, session: SessionState) -> None:
        self._opened.add_session(session)

    def closed(self, session: SessionState) -> None:
        self._opened.drop_session(session)
        tiering.let_go(session.basis.views)

    def ended(self, writing: Import) -> None:
        self._opened.drop_import(writing)

    def close(self) -> None:
        """Close every session and give all memory back. Closing twice does nothing."""
        if not self._open:
            return
        self._open = False
        self._blocks.loader.close()  # so that no session waits any more
        self._opened.close()
        self._builder.close()
        if self.gpu is not None:
            self.gpu.close()
        self._blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _published(self, views: Views) -> None:
        for kind in self.config.indexes.at_store:
            for view in self._long(views):
                self._builder.wish(view.segment, kind)

    def _long(self, views: Views) -> Views:
        """Those whose segments are worth an index."""
        return tuple(view for view in views if len(view.segment) >= self.config.indexes.segment_tokens_min)

    @contextmanager
    def _held(self, name: str) -> Iterator[Views]:
        """The views of a context, alive while the body runs. Raises NotFound."""
        self._check_open()
        context = self._catalog.hold(name)
        try:
            yield context.views
        finally:
            let_go(context)

    def _own(self, sessions: Sequence[object]) -> list[SessionState]:
        self._check_open()
        own = [session for session in sessions if isinstance(session, SessionState) and session.engine is self]
        check.together(sessions, own)
        return own

    def _check_open(self) -> None:
        if not self._open:
            raise Unavailable("the database is closed; connect again")
