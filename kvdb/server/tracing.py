"""Spans of calls for OpenTelemetry, by its API alone: who configures its SDK, as `opentelemetry-instrument kvdb serve` does, says
where they go."""

from collections.abc import Callable, Mapping
from typing import Protocol

import grpc

from kvdb.errors import Unsupported

Ended = Callable[[grpc.StatusCode, str], None]
"""Ends the span of a call. Takes its status, and what that says."""


class Tracing(Protocol):
    """Begins a span for each call."""

    def begin(self, method: str, metadata: Mapping[str, str | bytes], request: str) -> Ended:
        """A call has come. method: `/service/method`. metadata: what the client sent, perhaps with the span that it is part of.
        request: the id of the request."""
        ...


class NoTracing:
    """Begins none."""

    def begin(self, _method: str, _metadata: Mapping[str, str | bytes], _request: str) -> Ended:
        return _nothing


class OpenTelemetryTracing:
    """Spans of the kind SERVER, named and described by OpenTelemetry's conventions for RPC, below those of the clients."""

    def __init__(self) -> None:
        """Raises Unsupported where OpenTelemetry is not installed."""
        try:
            from opentelemetry import propagate, trace  # so that a server without traces needs none of it
        except ModuleNotFoundError:
            raise Unsupported("server.traces needs opentelemetry, which is not installed; pip install 'kvdb[tracing]'") from None
        self._extract = propagate.extract
        self._tracer = trace.get_tracer("kvdb.server")
        self._server, self._error = trace.SpanKind.SERVER, trace.StatusCode.ERROR

    def begin(self, method: str, metadata: Mapping[str, str | bytes], request: str) -> Ended:
        service, _, name = method.removeprefix("/").partition("/")
        told = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name, "kvdb.request_id": request}
        carrier = {key: value for key, value in metadata.items() if isinstance(value, str)}
        span = self._tracer.start_span(method.removeprefix("/"), self._extract(carrier), self._server, told)

        def end(code: grpc.StatusCode, said: str) -> None:
            number, _ = code.value
            span.set_attribute("rpc.grpc.status_code", number)
            if code is not grpc.StatusCode.OK:
                span.set_status(self._error, said)
            span.end()

        return end


def open_tracing(wanted: bool) -> Tracing:  # it is a setting
    """Spans where they are wanted. Raises Unsupported."""
    return OpenTelemetryTracing() if wanted else NoTracing()


def _nothing(_code: grpc.StatusCode, _said: str) -> None:
    pass
