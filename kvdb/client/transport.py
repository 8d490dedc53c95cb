"""The protocols between a client's handles and the database, which is in this process or on a server.

In this process, `kvdb.database.Database` and `kvdb.session.state.SessionState` satisfy them; `kvdb.client.remote` carries them to
a server. Arrays are numpy here, but for `step`. The database checks them, wherever it is, so that both ways raise the
same errors.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvdb.blend.controller import Choice
from kvdb.errors import KvdbError
from kvdb.types import (
    DEFAULT_RETENTION,
    Array,
    BackedUp,
    CallTimings,
    Checked,
    ContextInfo,
    ContextStatistics,
    ContextUpdate,
    DatabaseStatus,
    Dropped,
    Float32,
    IndexInfo,
    KeysValues,
    ModelSpec,
    Placed,
    Positions,
    PrefixMatch,
    PromptPart,
    Retention,
    SessionInfo,
    SessionStats,
    Space,
    TierStats,
    Tokens,
    UnknownFile,
)
from query_optimizer.plan import Plan
from query_optimizer.query_options import QueryOptions


class SessionTransport(Protocol):
    """One open session."""

    spec: ModelSpec
    reused: int
    start: int
    error_max: float

    @property
    def where(self) -> str:
        """Where it is open, for people."""
        ...

    @property
    def tokens(self) -> Tokens: ...

    @property
    def layout(self) -> tuple[Placed, ...]: ...

    def plan_recompute(self, seconds: float | None, floor: float, ratio: float | None) -> Choice: ...

    def overlay(self, layer: int, positions: Positions, k: Array, v: Array) -> None: ...

    def attention_at(self, layer: int, q: Array, positions: Positions) -> Array: ...

    def measure_deviation(self, layer: int, positions: Positions, k: Array, v: Array, score: str | None = None) -> Float32: ...

    def update(self, layer: int, k: Array, v: Array, start: int | None = None) -> None: ...

    def attention(self, layer: int, q: Array, options: QueryOptions) -> Array: ...

    def attend(self, layer: int, q: Array, k: Array, v: Array, options: QueryOptions, start: int | None = None) -> Array: ...

    def step(self, layer: int, q: Any, k: Any, v: Any, options: QueryOptions, start: int | None, /) -> Any | None:
        """`attend` of one token with the caller's own arrays, where the transport needs no others; None where it does, and then
        nothing was done."""
        ...

    def truncate(self, tokens: int) -> None: ...

    def read(
        self, layers: Sequence[int], start: int, stop: int | None = None, out: Sequence[KeysValues] | None = None
    ) -> list[KeysValues]: ...

    def fork(self) -> "SessionTransport": ...

    def store(
        self, name: str, tokens: Tokens | None = None, *, chunk: bool = False, retention: Retention = DEFAULT_RETENTION
    ) -> ContextInfo: ...

    def explain(self, layer: int, options: QueryOptions, analyze: bool = False) -> Plan: ...

    def stats(self) -> SessionStats: ...

    def close(self) -> None: ...


class ImportTransport(Protocol):
    """One import under way: `write` layers in any order and in any pieces, then `commit` or `abort`. `sample` hands in queries of
    a layer, at any time before. Nobody sees the context before the commit."""

    spec: ModelSpec
    start: int
    """How many leading tokens are stored already; only tokens [start, n) are written."""

    def write(self, layer: int, k: Array, v: Array) -> None: ...

    def sample(self, layer: int, q: Array) -> None: ...

    def commit(self) -> ContextInfo: ...

    def abort(self) -> None: ...


class Transport(Protocol):
    """One database."""

    @property
    def last_timings(self) -> CallTimings | None: ...

    def begin_import(
        self,
        spec: ModelSpec,
        tokens: Tokens,
        name: str,
        base: int | None = None,
        retention: Retention = DEFAULT_RETENTION,
        salt: str = "",
    ) -> ImportTransport: ...

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
    ) -> SessionTransport: ...

    def create_session_of_parts(
        self,
        spec: ModelSpec,
        parts: Sequence[PromptPart],
        error_max: float | None = None,
        salt: str = "",
        *,
        expected_tokens: int | None = None,
    ) -> SessionTransport: ...

    def create_sessions(
        self,
        spec: ModelSpec,
        prompts: Sequence[Tokens],
        error_max: float | None = None,
        salt: str = "",
        *,
        expected_tokens: int | None = None,
    ) -> Sequence[SessionTransport]: ...

    def update_together(
        self, sessions: Sequence[SessionTransport], layer: int, k: Array, v: Array, starts: Sequence[int] | None = None
    ) -> list[KvdbError | None]: ...

    def truncate_together(self, sessions: Sequence[SessionTransport], tokens: Sequence[int]) -> list[KvdbError | None]: ...

    def close_together(self, sessions: Sequence[SessionTransport]) -> None: ...

    def attend_together(
        self,
        sessions: Sequence[SessionTransport],
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        options: QueryOptions,
        starts: Sequence[int] | None = None,
    ) -> Array: ...

    def step_together(
        self,
        sessions: Sequence[SessionTransport],
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        options: QueryOptions,
        starts: Sequence[int] | None = None,
    ) -> Any | None:
        """`attend_together` of one token each with the caller's own arrays; None as `SessionTransport.step` has it."""
        ...

    def attention_together(self, sessions: Sequence[SessionTransport], layer: int, q: Array, options: QueryOptions) -> Array: ...

    def contexts(self, prefix: str, limit: int | None, after: str, metadata: Mapping[str, Any]) -> list[ContextInfo]: ...

    def token_ids(self, name: str) -> Tokens: ...

    def read(
        self, name: str, layers: Sequence[int], start: int, stop: int | None = None, out: Sequence[KeysValues] | None = None
    ) -> list[KeysValues]: ...

    def match(self, spec: ModelSpec, tokens: Tokens, salt: str = "") -> PrefixMatch: ...

    def get(self, name: str) -> ContextInfo: ...

    def update_context(self, name: str, change: ContextUpdate) -> ContextInfo: ...

    def drop(self, *names: str) -> None: ...

    def drop_all(self, prefix: str, metadata: Mapping[str, Any]) -> Dropped: ...

    def offload(self, name: str) -> int: ...

    def status(self) -> DatabaseStatus: ...

    def tiers(self) -> list[TierStats]: ...

    def build_index(self, name: str, kind: str, wait: bool) -> list[IndexInfo]: ...

    def indexes(self, name: str) -> list[IndexInfo]: ...

    def verify(self, name: str) -> int: ...

    def check(self, name: str) -> Checked: ...

    def check_store(self) -> list[str]: ...

    def backup(self, folder: str, link: bool) -> BackedUp: ...

    def unknown_files(self, remove: bool) -> list[UnknownFile]: ...

    def compact(self) -> int: ...

    def space(self) -> Space: ...

    def sessions(self) -> list[SessionInfo]: ...

    def explain_session(self, label: str, layer: int | None, options: QueryOptions, analyze: bool) -> list[Plan]: ...

    def explain(self, name: str, layer: int | None, options: QueryOptions, analyze: bool) -> list[Plan]: ...

    def statistics(self, name: str) -> ContextStatistics: ...

    def close(self) -> None: ...
