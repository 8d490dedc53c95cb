"""Every call is seen at the edge: whose it is, how long it takes and how it ends."""

import re
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import grpc

from kvdb.errors import KvdbError
from kvdb.events import Events, Kind, Origin, new_request, originating
from kvdb.rpc.status import code_of
from kvdb.server.metrics.calls import CallMetrics
from kvdb.server.tracing import Traced, Tracing

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

REQUEST_ID = "x-request-id"
REFUSALS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAVAILABLE,
}
FAILURES = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}

_fits = re.compile(r"[\w.:/+=-]{1,64}", re.ASCII).fullmatch


class CallsSeen(grpc.ServerInterceptor):
    """Gives every call its origin, and tells metrics and events how it ended. The first of a server's interceptors, so that it
    sees what the others refuse."""

    def __init__(
        self,
        metrics: CallMetrics,
        events: Events,
        tracing: Tracing,
        tenant_of: Callable[[grpc.ServicerContext], str] = lambda _context: "",
    ) -> None:
        """tenant_of: whose call it is, "" where nobody knows."""
        self.tenant_of = tenant_of
        self._metrics = metrics
        self._events = events
        self._tracing = tracing

    def intercept_service(
        self, continuation: "Callable[[grpc.HandlerCallDetails], Handler | None]", details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = continuation(details)
        if handler is None:
            return None
        metadata = dict(details.invocation_metadata or ())
        request = request_id(metadata)
        seen = _Seen(self, details.method, request, self._tracing.begin(details.method, metadata, request))
        return _wrapped(handler, seen)

    def ended(self, method: str, by: Origin, seconds: float, code: grpc.StatusCode, said: str) -> None:
        """A call is over. said: what its status says, "" for nothing."""
        self._tell(self._metrics.ended(method, code, seconds), by, code, said)

    def failed(self, call: str, by: Origin, error: KvdbError) -> None:
        """A call through shared memory has failed. call: its name."""
        code = code_of(error)
        self._metrics.failed(code)
        self._tell(call, by, code, str(error))

    def _tell(self, method: str, by: Origin, code: grpc.StatusCode, said: str) -> None:
        if code in REFUSALS or code in FAILURES:
            with originating(by):
                kind = Kind.REFUSED if code in REFUSALS else Kind.FAILED
                self._events.tell(kind, method=method, code=code.name, why=said)


class _Seen:
    """One call."""

    def __init__(self, calls: CallsSeen, method: str, request: str, traced: Traced) -> None:
        self.traced = traced
        self.origin = Origin(request=request)
        self._calls = calls
        self._method = method
        self._started = perf_counter()

    def begin(self, context: grpc.ServicerContext) -> None:
        self.origin = self.origin._replace(tenant=self._calls.tenant_of(context))

        def ended() -> None:
            code = _code_of(context)
            said = context.details() or b""  # type: ignore[attr-defined]
            text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
            self.traced.end(code, text)
            self._calls.ended(self._method, self.origin, perf_counter() - self._started, code, text)

        if not context.add_callback(ended):
            ended()


def _code_of(context: grpc.ServicerContext) -> grpc.StatusCode:
    """How a call ended. gRPC has no status for one that its client broke off, and says so in a part that is not public alone."""
    code: grpc.StatusCode | None = context.code()  # type: ignore[attr-defined]
    if code is not None:
        return code
    cancelled = getattr(getattr(context, "_state", None), "client", "") == "cancelled"
    return grpc.StatusCode.CANCELLED if cancelled else grpc.StatusCode.OK


def _wrapped(handler: "Handler", seen: _Seen) -> "Handler":
    inner: Any = handler
    if not inner.response_streaming:
        name = "stream_unary" if inner.request_streaming else "unary_unary"
        behaviour = getattr(inner, name)

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            seen.begin(context)
            with originating(seen.origin), seen.traced.current():
                return behaviour(request, context)

        return cast("Handler", inner._replace(**{name: answer}))
    name = "stream_stream" if inner.request_streaming else "unary_stream"
    behaviour = getattr(inner, name)
    if getattr(behaviour, "experimental_non_blocking", False):

        def receive(request: Any, context: grpc.ServicerContext, send: Any) -> None:
            seen.begin(context)
            with originating(seen.origin), seen.traced.current():
                behaviour(request, context, send)

        receive.experimental_non_blocking = True  # type: ignore[attr-defined]
        return cast("Handler", inner._replace(**{name: receive}))

    def replies(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        seen.begin(context)
        with originating(seen.origin), seen.traced.current():
            yield from behaviour(request, context)

    return cast("Handler", inner._replace(**{name: replies}))


def request_id(metadata: Mapping[str, str | bytes]) -> str:
    """What the client calls its request, or a new name where it says nothing or nothing that fits in a log."""
    given = metadata.get(REQUEST_ID, "")
    return given if isinstance(given, str) and _fits(given) else new_request()
