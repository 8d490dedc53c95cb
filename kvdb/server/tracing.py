"""Spans of calls for OpenTelemetry, by its API alone: who configures its SDK, as `opentelemetry-instrument kvdb serve` does, says
where they go."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import time_ns
from typing import Any, NamedTuple, Protocol

import grpc

from kvdb.errors import KvdbError, Unsupported
from kvdb.events import origin
from kvdb.session.runner import Starts
from kvdb.session.state import SessionState
from kvdb.types import Array
from query_optimizer.query_options import QueryOptions

QUERIES = ("attention", "attend")
"""The calls of a session that are spans."""


class Together(Protocol):
    """What answers queries of several sessions in one call; see `kvdb.database.Database`."""

    def attend(
        self,
        sessions: Sequence[object],
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        options: QueryOptions,
        starts: Starts = None,
    ) -> Array: ...

    def attention(self, sessions: Sequence[object], layer: int, q: Array, options: QueryOptions) -> Array: ...


class Traced(Protocol):
    """The span of a call."""

    def current(self) -> AbstractContextManager[object]:
        """For `with`: spans that begin in the body are below it."""
        ...

    def end(self, code: grpc.StatusCode, said: str) -> None:
        """The call is over. said: what its status says."""
        ...


class Tracing(Protocol):
    """Begins a span for each call, and below it for each query of a session."""

    def begin(self, method: str, metadata: Mapping[str, str | bytes], request: str) -> Traced:
        """A call has come. method: `/service/method`. metadata: what the client sent, perhaps with the span that it is part of.
        request: the id of the request."""
        ...

    def opened(self, session: SessionState) -> None:
        """A session was opened, whose queries are spans from now on."""
        ...

    def together(self, queries: Together) -> Together:
        """The same, whose queries are spans."""
        ...

    def waited(self, seconds: float) -> None:
        """The call of this thread has just waited so long for the engine."""
        ...


class _Untraced:
    def current(self) -> AbstractContextManager[object]:
        return _NOTHING

    def end(self, _code: grpc.StatusCode, _said: str) -> None:
        pass


_NOTHING, _UNTRACED = nullcontext(), _Untraced()


class NoTracing:
    """Begins none."""

    def begin(self, _method: str, _metadata: Mapping[str, str | bytes], _request: str) -> Traced:
        return _UNTRACED

    def opened(self, _session: SessionState) -> None:
        pass

    def together(self, queries: Together) -> Together:
        return queries

    def waited(self, _seconds: float) -> None:
        pass


class _Span:
    """A span of OpenTelemetry's, and its API."""

    def __init__(self, trace: Any, span: Any) -> None:
        self._trace = trace
        self._span = span

    def current(self) -> AbstractContextManager[object]:
        used: AbstractContextManager[object] = self._trace.use_span(self._span, end_on_exit=False, record_exception=False)
        return used

    def end(self, code: grpc.StatusCode, said: str) -> None:
        number, _ = code.value
        self._span.set_attribute("rpc.grpc.status_code", number)
        if code is not grpc.StatusCode.OK:
            self._span.set_status(self._trace.StatusCode.ERROR, said)
        self._span.end()


class OpenTelemetryTracing:
    """Spans of the kind SERVER, named and described by OpenTelemetry's conventions for RPC, below those of the clients; queries
    of sessions, also those through shared memory; and below these their stages, one behind the other."""

    def __init__(self) -> None:
        """Raises Unsupported where OpenTelemetry is not installed."""
        try:
            from opentelemetry import propagate, trace  # so that a server without traces needs none of it
        except ModuleNotFoundError:
            raise Unsupported("server.traces needs opentelemetry, which is not installed; pip install 'kvdb[tracing]'") from None
        self._extract = propagate.extract
        self._trace = trace
        self._tracer = trace.get_tracer("kvdb.server")

    def begin(self, method: str, metadata: Mapping[str, str | bytes], request: str) -> Traced:
        service, _, name = method.removeprefix("/").partition("/")
        told = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name, "kvdb.request_id": request}
        carrier = {key: value for key, value in metadata.items() if isinstance(value, str)}
        kind = self._trace.SpanKind.SERVER
        return _Span(self._trace, self._tracer.start_span(method.removeprefix("/"), self._extract(carrier), kind, told))

    def opened(self, session: SessionState) -> None:
        for name in QUERIES:
            setattr(session, name, self._traced(name, session, getattr(session, name)))

    def together(self, queries: Together) -> Together:
        return TracedTogether(queries, self.query)

    def waited(self, seconds: float) -> None:
        ended = time_ns()
        told = {"kvdb.request_id": origin().request}
        self._tracer.start_span("kvdb.queue", attributes=told, start_time=ended - round(seconds * 1e9)).end(ended)

    @contextmanager
    def query(self, name: str, layer: int, sessions: Sequence[SessionState]) -> Iterator[None]:
        """For `with`: the body asks these sessions, which is a span, above one for each stage."""
        told: dict[str, Any] = {"kvdb.layer": layer, "kvdb.sessions": len(sessions), "kvdb.request_id": origin().request}
        before, begun = _stage_seconds(sessions), time_ns()
        span = self._tracer.start_span(f"kvdb.{name}", attributes=told, start_time=begun)
        try:
            yield
        except KvdbError as error:
            span.set_status(self._trace.StatusCode.ERROR, str(error))
            raise
        finally:
            self._stages(span, begun, before, _stage_seconds(sessions))
            span.end()

    def _traced(self, name: str, session: SessionState, query: Callable[..., Any]) -> Callable[..., Any]:
        def traced(layer: int, *given: Any) -> Any:
            with self.query(name, layer, (session,)):
                return query(layer, *given)

        return traced

    def _stages(self, span: Any, begun: int, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Spans below a query's for what its stages took."""
        below = self._trace.set_span_in_context(span)
        for stage, seconds in after.items():
            if (took := round((seconds - before[stage]) * 1e9)) > 0:
                self._tracer.start_span(f"kvdb.stage.{stage}", below, start_time=begun).end(begun + took)
                begun += took


class TracedTogether(NamedTuple):
    """Queries of several sessions, in `query`, which is for `with`."""

    queries: Together
    query: Callable[[str, int, Sequence[Any]], AbstractContextManager[None]]

    def attend(self, sessions: Sequence[object], layer: int, *given: Any) -> Array:
        with self.query("attend_together", layer, sessions):
            return self.queries.attend(sessions, layer, *given)

    def attention(self, sessions: Sequence[object], layer: int, *given: Any) -> Array:
        with self.query("attention_together", layer, sessions):
            return self.queries.attention(sessions, layer, *given)


def _stage_seconds(sessions: Sequence[SessionState]) -> dict[str, float]:
    """The seconds of all of them so far by stage."""
    each = [session.stage_seconds() for session in sessions]
    return {stage: sum(seconds[stage] for seconds in each) for stage in each[0]} if each else {}


def open_tracing(wanted: bool) -> Tracing:  # it is a setting
    """Spans where they are wanted. Raises Unsupported."""
    return OpenTelemetryTracing() if wanted else NoTracing()
