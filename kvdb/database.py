"""One database in this process. `kvdb.connect` wraps it for users, `kvdb serve` offers it over gRPC."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Self

import kvdb.forks as forks
import kvdb.hardware.cpu as cpu
import kvdb.hardware.kernels as kernels
import kvdb.hardware.profile as profile
import kvdb.session.batch as batch
import kvdb.validate as validate
from kvdb.blend.rope import inverse_frequencies
from kvdb.catalog.evictor import open_evictor
from kvdb.catalog.habits import Habits
from kvdb.catalog.layout_builder import build_layout
from kvdb.catalog.overlay import Overlay
from kvdb.catalog.segment import Segment
from kvdb.catalog.snapshot import Snapshot
from kvdb.catalog.stored_catalog import open_catalog
from kvdb.config import Config, checked
from kvdb.errors import ConfigError, InvalidArgument
from kvdb.events import Events
from kvdb.gpu.interface import GpuInterface
from kvdb.gpu.opening import open_accelerator, open_backend, open_configured_device
from kvdb.indexing.advisor import IndexAdvisor
from kvdb.indexing.background_time import BackgroundTime
from kvdb.indexing.builder import IndexBuilder
from kvdb.ingest.cold import Cold
from kvdb.ingest.compactor import Compactor
from kvdb.ingest.import_writer import ImportTarget, ImportWriter
from kvdb.ingest.publisher import NewContext, Publisher
from kvdb.operations.contexts import ContextOperations
from kvdb.operations.indexes import IndexOperations
from kvdb.operations.many_sessions import ManySessions
from kvdb.operations.sessions import SessionOperations
from kvdb.operations.status import status
from kvdb.operations.stores import StoreOperations
from kvdb.session.activity import SessionActivity
from kvdb.session.batch import Starts
from kvdb.session.late_proofs import LateProofs
from kvdb.session.open_handles import OpenHandles, counted_call
from kvdb.session.services import SessionServices
from kvdb.session.sharing import SharedSessions
from kvdb.session.state import SessionState
from kvdb.session.terms import SessionTerms
from kvdb.storage.store import BlockStore
from kvdb.types import DEFAULT_RETENTION, Array, CallTimings, DatabaseStatus, ModelSpec, PromptPart, Retention, Tokens
from query_optimizer.build_policy import BuildPolicy
from query_optimizer.custom_rules import BadRule, PlacedRule, add_rules
from query_optimizer.optimizer import Optimizer, UnknownRule
from query_optimizer.query_options import QueryOptions, checked_error_max
from query_optimizer.rules import base_rules

# size: what one database is made of, and the calls that more than one of its services answer


class Database(ContextOperations, IndexOperations, SessionOperations, ManySessions, StoreOperations):
    """Contexts, their segments, and the sessions over them. Thread-safe."""

    last_timings: CallTimings | None = None
    """None: what a server measures of a call, see `kvdb.client.client.Client.last_timings`."""

    def __init__(self, config: Config | None = None, rules: Sequence[PlacedRule] = ()) -> None:
        """rules: added to those of the optimizer. A number of threads in the configuration is the process's from now on.

        Raises ConfigError for a rule in the configuration that does not exist, for a GPU that does not exist or is too small,
        InvalidArgument for a rule that cannot be added, and what `open_catalog` and `StoreFolder` raise.
        """
        self.config = checked(config)
        cpu.use(self.config.cpu)
        try:
            base = base_rules(self.config.optimizer.short_context_tokens, self.config.indexes.on_demand)
            self.optimizer = Optimizer(add_rules(base, rules), self.config.optimizer.rules_off, by_name=bool(rules))
        except BadRule as error:
            raise InvalidArgument(f"rules: {error}") from None
        except UnknownRule as error:
            raise ConfigError(f"optimizer.rules_off: {error}") from None
        measured = profile.load(self.config.optimizer.machine_file)
        self.machine = measured.machine
        kernels.use(measured.kernels)
        self.events = Events()
        device = open_configured_device(self.config.storage)
        self._blocks = BlockStore(self.config.storage, device)
        self._blocks.loader.events = self._blocks.loader.pool.events = self.events
        self._catalog = open_catalog(self._blocks, self.config.storage.durability)
        self._catalog.events = self.events
        self.gpu: GpuInterface | None = open_backend(device, self._blocks, self.config.optimizer.machine_file)
        open_evictor(self._catalog, self._blocks, self.config.storage.eviction)
        indexes = self.config.indexes
        time = BackgroundTime()
        self._builder = IndexBuilder(
            self._blocks.loader, indexes.threads, indexes.bytes_max, open_accelerator(device), self.events, time
        )
        self._advisor = IndexAdvisor(self._builder, BuildPolicy(indexes.opened_often), indexes)
        self._compactor = Compactor(self._catalog, self._blocks, self._advisor, Cold.of(self.config.storage))
        self._publisher = Publisher(self._catalog, self._blocks, self._advisor, self._compactor)
        self.handles = OpenHandles()
        self._shared = SharedSessions()
        self._activity = SessionActivity()
        self._opened = monotonic()
        self._auditor = ThreadPoolExecutor(1, "kvdb-audit")
        self._prover = LateProofs(self._blocks.budget, time, partial(self._builder.wait, 0))
        self._services = SessionServices(
            config=self.config,
            optimizer=self.optimizer,
            machine=self.machine,
            gpu=self.gpu,
            advisor=self._advisor,
            budget=self._blocks.budget,
            loader=self._blocks.loader,
            handles=self.handles,
            publisher=self._publisher,
            space=self._compactor,
            auditor=self._auditor,
            prover=self._prover,
            background_time=time,
            habits=Habits(),
            activity=self._activity,
            events=self.events,
        )
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
            inverse_frequencies(spec.rope, spec.head_dim)
            views = self._publisher.chunk_views(spec, ids, validate.salt(salt))
        else:
            views = self._catalog.match(spec, ids, validate.salt(salt))
        self._catalog.use(views)
        target = ImportTarget(NewContext(spec, name, kept, salt), ids, base)
        return ImportWriter(self.handles, self._publisher, target, views, self._blocks.tables(spec))

    @counted_call
    def status(self) -> DatabaseStatus:
        """How the database is used at the moment. It takes time with the number of contexts."""
        return status(self, self.activity().sessions_open, self.uptime_seconds)

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
        views = self._shared.extended(spec, salt, ids, self._catalog.match(spec, ids, validate.salt(salt)))
        self._catalog.use(views)
        self._advisor.count_session(views)
        self._activity.count_prompt(len(ids), views)
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
    def attend_together(
        self, sessions: Sequence[object], layer: int, q: Array, k: Array, v: Array, options: QueryOptions, starts: Starts = None
    ) -> Array:
        """One step of several of its sessions; see `kvdb.session.batch.attend`. Raises InvalidArgument for a session of another
        database."""
        return batch.attend(self._own(sessions), layer, q, k, v, options, starts)

    @counted_call
    def step_together(
        self, sessions: Sequence[object], layer: int, q: Any, k: Any, v: Any, options: QueryOptions, starts: Starts = None
    ) -> Any | None:
        """`attend_together` on the GPU alone; see `kvdb.session.batch.step`. Raises InvalidArgument as `attend_together` does."""
        return None if self.gpu is None else batch.step(self._own(sessions), layer, q, k, v, options, starts)

    @counted_call
    def attention_together(self, sessions: Sequence[object], layer: int, q: Array, options: QueryOptions) -> Array:
        """A query of several of its sessions; see `kvdb.session.batch.attention`. Raises InvalidArgument for a session of another
        database."""
        return batch.attention(self._own(sessions), layer, q, options)

    @counted_call
    def drop(self, *names: str) -> None:
        """Forget contexts, all or none, and give back the space of what nobody sees any more. Open sessions over them go on.
        Raises NotFound."""
        super().drop(*names)
        self._compactor.settle()

    @counted_call
    def offload(self, name: str) -> int:
        """Move a context's segments to disk, once compaction in the background has made those that it will see; see
        `residency.offload`. Raises NotFound too."""
        self._compactor.wait()
        return super().offload(name)

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
        if not self.handles.refuse():
            return
        self._prover.close()
        self._blocks.loader.close()  # so that nobody waits for a segment any more
        self._builder.close()  # nor for an index
        self._compactor.stop()
        self.handles.close()
        self._auditor.shutdown()
        self._compactor.close()
        if self.gpu is not None:
            self.gpu.close()
        self._catalog.close()
        self._blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _held_segments(self) -> list[Segment]:
        return [*super()._held_segments(), *self._compactor.held_segments(), *self._prover.held_segments()]

    def _own(self, sessions: Sequence[object]) -> list[SessionState]:
        own = [session for session in sessions if isinstance(session, SessionState) and session.services is self._services]
        validate.together(sessions, own)
        return own
