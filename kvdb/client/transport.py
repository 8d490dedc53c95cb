"""The protocols between a client's handles and a session or an import, which is in this process or on a server.

In this process, `kvdb.session.state.SessionState` and `kvdb.ingest.import_writer.ImportWriter` satisfy them; `kvdb.client.remote`
carries them to a server. For the whole database there is none: what carries its calls has the public methods of
`kvdb.database.Database`. Arrays are numpy here, but for `step`. The database checks them, wherever it is, so that both ways
raise the same errors.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvdb.blend.controller import Choice
from kvdb.types import (
    DEFAULT_RETENTION,
    Array,
    ContextInfo,
    Float32,
    KeysValues,
    ModelSpec,
    Placed,
    Positions,
    Retention,
    SessionStats,
    Tokens,
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

    def deviation(self, layer: int, positions: Positions, k: Array, v: Array, score: str | None = None) -> Float32: ...

    def update(self, layer: int, k: Array, v: Array, start: int | None = None, *, indexer: bool = False) -> None: ...

    def attention(self, layer: int, q: Array, options: QueryOptions) -> Array: ...

    def attend(self, layer: int, q: Array, k: Array, v: Array, options: QueryOptions, start: int | None = None) -> Array: ...

    def attend_selected(
        self, layer: int, q: Array, kv: KeysValues | None, asked: tuple[Float32, Float32], start: int | None = None
    ) -> Array: ...

    def step(self, layer: int, q: Any, k: Any, v: Any, options: QueryOptions, start: int | None, /) -> Any | None:
        """`attend` of one token with the caller's own arrays, where the transport needs no others; None where it does, and then
        nothing was done."""
        ...

    def truncate(self, tokens: int) -> None: ...

    def state(self, layer: int, position: int | None = None) -> Mapping[str, Array]: ...

    def put_state(self, layer: int, arrays: Mapping[str, Array], position: int | None = None) -> None: ...

    def put_sinks(self, layer: int, sinks: Float32) -> None: ...

    def read(
        self,
        layers: Sequence[int],
        start: int,
        stop: int | None = None,
        out: Sequence[KeysValues] | None = None,
        *,
        indexer: bool = False,
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

    def write(self, layer: int, k: Array, v: Array, *, indexer: bool = False, start: int | None = None) -> None: ...

    def put_state(self, layer: int, arrays: Mapping[str, Array], position: int | None = None) -> None: ...

    def sample(self, layer: int, q: Array) -> None: ...

    def commit(self) -> ContextInfo: ...

    def abort(self) -> None: ...
