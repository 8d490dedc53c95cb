"""The database as one tenant sees it: with its own contexts and sessions, as if there were no others."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvdb.config import Config
from kvdb.database import Database
from kvdb.errors import NotFound, PermissionDenied, SessionClosed
from kvdb.indexing.database_status import database_status
from kvdb.rpc.call import Tenant, WireCall
from kvdb.rpc.calls import OF_METHOD
from kvdb.server.tenancy.imports import TenantImport
from kvdb.server.tenancy.names import Names
from kvdb.server.tenancy.quota import Holdings, Quota
from kvdb.server.tenancy.shared import SharedContexts, check_own, mark
from kvdb.session.state import SessionState
from kvdb.types import (
    DEFAULT_RETENTION,
    ContextInfo,
    ContextUpdate,
    DatabaseStatus,
    Dropped,
    ModelSpec,
    PrefixMatch,
    PromptPart,
    Retention,
    SessionInfo,
    Space,
    TierStats,
    Tokens,
    ViewInfo,
)
from query_optimizer.plan import Plan
from query_optimizer.query_options import QueryOptions


class TenantDatabase:
    """The calls of a `Database` that a server makes, on what is one tenant's; each raises what that call raises, in which names
    are those of the database. What is not this tenant's and what is not there are looked up alike. Thread-safe.

    Calls for which the table of calls says all, are made from it; here stand the others."""

    if TYPE_CHECKING:

        def __getattr__(self, method: str) -> Callable[..., Any]: ...

    def __init__(self, database: Database, tenant: str, sessions: Callable[[], list[SessionState]]) -> None:
        """sessions: the open ones of this tenant."""
        self.quota = Quota(database.config.quotas, tenant, database.events)
        self._database = database
        self._tenant = tenant
        self._names = Names(tenant)
        self._shared = SharedContexts(database, tenant, self._names)
        self._sessions = sessions

    @property
    def config(self) -> Config:
        return self._database.config

    def begin_import(
        self,
        spec: ModelSpec,
        tokens: Tokens,
        name: str,
        base: int | None = None,
        retention: Retention = DEFAULT_RETENTION,
        salt: str = "",
    ) -> TenantImport:
        names = self._names
        nbytes = max(0, len(tokens) - (base or 0)) * spec.tokens_nbytes
        comes = self._coming(nbytes, retention)
        self.quota.announce(comes, self._held)
        try:
            writer = self._database.begin_import(spec, tokens, names.inner(name), base, retention, names.salt(salt))
        except BaseException:
            self.quota.done(comes)
            raise
        return TenantImport(writer, names, self.quota, comes)

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
        self.check_session()
        own = error_max, self._names.salt(salt)
        return self._database.create_session(spec, tokens, *own, share=share, label=label, expected_tokens=expected_tokens)

    def check_session(self) -> None:
        """Raises QuotaExceeded where the tenant may open no more sessions."""
        self.quota.check_sessions(len(self._sessions()))

    def _held(self) -> Holdings:
        """What this tenant has, in contexts and sessions."""
        contexts = self._database.contexts(self._names.prefix)
        own = sum(tail.nbytes for session in self._sessions() for tail in session.tails)
        in_memory = sum(info.nbytes for info in contexts if info.resident)
        on_disk = self._database.disk_nbytes(info.name for info in contexts)
        return Holdings(len(contexts), sum(info.nbytes for info in contexts), in_memory + own, on_disk)

    def _coming(self, nbytes: int, retention: Retention) -> Holdings:
        """A context of so many bytes."""
        return Holdings(1, nbytes, nbytes, nbytes if self._database.goes_to_disk(retention) else 0)

    def create_session_of_parts(
        self,
        spec: ModelSpec,
        parts: Sequence[PromptPart],
        error_max: float | None = None,
        salt: str = "",
        *,
        expected_tokens: int | None = None,
    ) -> SessionState:
        self.check_session()
        laid = self._shared.laid(parts)
        own = error_max, self._names.salt(salt), laid.salts
        session = self._database.create_session_of_parts(spec, laid.parts, *own, expected_tokens=expected_tokens)
        if laid.salts:
            mark(session)
        return session

    def open_context(self, name: str, tokens: int | None = None) -> SessionState:
        self.check_session()
        return self._database.open_context(self._shared.inner(name), tokens)

    def store(self, session: SessionState, name: str, tokens: Tokens | None, *, chunk: bool, retention: Retention) -> ContextInfo:
        check_own(session)
        with self.quota.storing(self._coming(sum(tail.nbytes for tail in session.tails), retention), self._held):
            stored = self._database.store(session, self._names.inner(name), tokens, chunk=chunk, retention=retention)
        return self._names.info(stored)

    def contexts(
        self, prefix: str = "", limit: int | None = None, after: str = "", metadata: Mapping[str, Any] | None = None
    ) -> list[ContextInfo]:
        behind = self._names.prefix + after if after else ""
        found = self._database.contexts(self._names.prefix + prefix, limit, behind, metadata)
        return [self._names.info(info) for info in found]

    def count_contexts(self) -> int:
        return len(self._database.contexts(self._names.prefix))

    def match(self, spec: ModelSpec, tokens: Tokens, salt: str = "") -> PrefixMatch:
        return self._database.match(spec, tokens, self._names.salt(salt))

    def get(self, name: str) -> ContextInfo:
        return self._shared.info(name)

    def views(self, name: str) -> list[ViewInfo]:
        return self._database.views(self._names.inner(name))

    def rename(self, name: str, new: str) -> ContextInfo:
        return self._names.info(self._database.rename(self._names.inner(name), self._names.inner(new)))

    def update(self, name: str, change: ContextUpdate) -> ContextInfo:
        if change.name is not None:
            change = replace(change, name=self._names.inner(change.name))
        return self._names.info(self._database.update(self._names.inner(name), change))

    def drop(self, *names: str) -> Dropped:
        self._database.drop(*map(self._names.inner, names))
        return Dropped(names, ())

    def drop_all(self, prefix: str, metadata: Mapping[str, Any]) -> Dropped:
        done = self._database.drop_all(self._names.prefix + prefix, metadata)
        outer = self._names.outer
        return Dropped(tuple(map(outer, done.names)), tuple(map(outer, done.in_use)))

    def offload(self, name: str) -> int:
        inner = self._names.inner(name)
        nbytes = self._database.get(inner).nbytes - self._database.disk_nbytes([inner])
        with self.quota.storing(Holdings(disk_nbytes=max(0, nbytes)), self._held):
            return self._database.offload(inner)

    def sessions(self) -> list[SessionInfo]:
        told = []
        for session in self._labelled():
            with suppress(SessionClosed):  # meanwhile
                stats = session.stats()
                told.append(SessionInfo(session.label, stats.tokens, stats.reused, stats.queries))
        return told

    def open_sessions(self) -> list[SessionState]:
        return self._sessions()

    def count_sessions(self) -> int:
        return len(self._sessions())

    def explain_session(self, label: str, layer: int | None, options: QueryOptions, analyze: bool) -> list[Plan]:
        found = [session for session in self._labelled() if session.label == label]
        if not found:
            raise NotFound(f"no open session has the label {label!r}; kvdb explain --session lists those that have one")
        layers = found[-1].spec.attending if layer is None else [layer]
        return [found[-1].explain(number, options, analyze) for number in layers]

    def tiers(self) -> list[TierStats]:
        """What its contexts hold, in blocks of one byte: segments that several of them see once, in main memory or on disk."""
        segments = {}
        for info in self._database.contexts(self._names.prefix):
            with suppress(NotFound):  # it was dropped meanwhile
                segments.update({view.segment: view for view in self._database.views(info.name)})
        told = {"cpu": 0, "disk": 0}
        for view in segments.values():
            told["cpu" if view.resident else "disk"] += view.nbytes
        return [TierStats(tier, nbytes, nbytes, 1, nbytes, huge=False) for tier, nbytes in told.items()]

    def tier_limits(self) -> dict[str, int]:
        """None: those of the database are for all tenants together."""
        return {}

    def status(self) -> DatabaseStatus:
        return database_status(self, len(self._sessions()), self._database.uptime_seconds)

    def space(self) -> Space:
        return self._database.space(self._names.prefix)

    def _labelled(self) -> list[SessionState]:
        return [session for session in self._sessions() if session.label]

    def _make(self, call: WireCall, *values: Any) -> Any:
        """Make a call as its rule says. Raises PermissionDenied too."""
        if call.tenant is Tenant.REFUSED:
            raise PermissionDenied(
                f"{call.method} is about the whole database, of which tenant {self._tenant} has a part; call it with an admin's "
                "token"
            )
        inner = {Tenant.OWN: self._names.inner, Tenant.READS: self._shared.inner}.get(call.tenant)
        if inner is not None:
            values = inner(values[0]), *values[1:]
        told = getattr(self._database, call.method)(*values)
        return self._names.info(told) if isinstance(told, ContextInfo) else told


def _making(call: WireCall) -> Callable[..., Any]:
    """The method that makes a call."""

    def make(self: TenantDatabase, *values: Any) -> Any:
        return self._make(call, *values)

    return make


for _call in OF_METHOD.values():
    if _call.tenant is not Tenant.BY_HAND:
        setattr(TenantDatabase, _call.method, _making(_call))
