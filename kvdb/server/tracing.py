"""Spans of calls for OpenTelemetry, by its API alone: who configures its SDK, as `opentelemetry-instrument kvdb serve` does, says
where they go."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from time import time_ns
from typing import Any, Protocol

import grpc

from kvdb.errors import KvdbError, Unsupported
from kvdb.events import origin
from kvdb.session.state import SessionState

QUERIES = ("attention", "attend")
"""The calls of a session that are spans."""


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

    def _traced(self, name: str, session: SessionState, query: Callable[..., Any]) -> Callable[..., Any]:
        def traced(layer: int, *given: Any) -> Any:
            told: dict[str, Any] = {"kvdb.layer": layer, "kvdb.request_id": origin().request}
            before, begun = session.stage_seconds(), time_ns()
            span = self._tracer.start_span(f"kvdb.{name}", attributes=told, start_time=begun)
            try:
                return query(layer, *given)
            except KvdbError as error:
                span.set_status(self._trace.StatusCode.ERROR, str(error))
                raise
            finally:
                self._stages(span, begun, before, session.stage_seconds())
                span.end()

        return traced

    def _stages(self, span: Any, begun: int, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Spans below a query's for what its stages took."""
        below = self._trace.set_span_in_context(span)
        for stage, seconds in after.items():
            if (took := round((seconds - before[stage]) * 1e9)) > 0:
                self._tracer.start_span(f"kvdb.stage.{stage}", below, start_time=begun).end(begun + took)
                begun += took


def open_tracing(wanted: bool) -> Tracing:  # it is a setting
    """Spans where they are wanted. Raises Unsupported."""
    return OpenTelemetryTracing() if wanted else NoTracing()
