"""The edge of the service: messages come in as bytes, whatever a call raises becomes a status, and the token is checked."""

import hmac
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from kvdb.errors import InternalError, InvalidArgument, KvdbError, Unauthenticated
from kvdb.rpc.status import abort, set_status
from kvdb.server.inflight import InflightBytes
from kvdb.server.turns import Turns

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

HEALTH = "/grpc.health.v1.Health/"
M = TypeVar("M", bound=Message)

_log = logging.getLogger(__name__)


def parsed(kind: type[M], data: bytes) -> M:
    """The message of these bytes. Raises InvalidArgument."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"a message of {len(data)} bytes is no {kind.__name__}: {error}") from None


@contextmanager
def errors_told(call: str, tell: Callable[[KvdbError], None]) -> Iterator[None]:
    """Hand what the body raises to `tell`, as an error of kvdb: a bug, of which the log has more, is an InternalError."""
    try:
        yield
    except grpc.RpcError:
        raise  # the client is gone, which gRPC says by raising from its iterator of requests
    except KvdbError as error:
        tell(error)
    except Exception as error:
        _log.exception("%s failed", call)
        tell(InternalError(f"{call} met a bug of kvdb's: {type(error).__name__}: {error}; the server's log has more"))


def blocking(call: str, kind: type[M], behaviour: Callable[[M, grpc.ServicerContext], Any]) -> "Handler":
    """A unary method that keeps its thread until it has answered."""

    def guarded(data: bytes, context: grpc.ServicerContext) -> Any:
        with errors_told(call, partial(abort, context)):
            return behaviour(parsed(kind, data), context)

    return grpc.unary_unary_rpc_method_handler(guarded, None, _serialize)


def stream(call: str, behaviour: Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[Any]]) -> "Handler":
    """A bidirectional method, which takes its messages as bytes."""

    def guarded(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        with errors_told(call, partial(abort, context)):
            yield from behaviour(requests, context)

    return grpc.stream_stream_rpc_method_handler(guarded, None, _serialize)


class UnaryCalls:
    """Unary methods that give their thread back while they wait for their turn.

    To gRPC such a method is one that streams a single reply, which may come from any thread; on the wire both are the same.
    """

    def __init__(self, turns: Turns, inflight: InflightBytes) -> None:
        self._turns = turns
        self._inflight = inflight

    def handler(self, call: str, kind: type[M], behaviour: Callable[[M, grpc.ServicerContext], Any]) -> "Handler":
        """The method of a call: it has its turn when no other call uses the sessions that its request names."""

        def receive(data: bytes, context: grpc.ServicerContext, send: Callable[[Any], None]) -> None:
            nbytes = len(data)
            with errors_told(call, partial(_end, context, send)), ExitStack() as refused:
                self._inflight.take(nbytes)
                refused.callback(self._inflight.give_back, nbytes)
                request = parsed(kind, data)
                self._turns.call(context.peer(), _sessions(request), lambda: answer(request, context, send, nbytes))
                refused.pop_all()

        def answer(request: M, context: grpc.ServicerContext, send: Callable[[Any], None], nbytes: int) -> None:
            try:
                with errors_told(call, partial(_end, context, send)):
                    if context.is_active():
                        send(behaviour(request, context))
                        send(None)
            finally:
                self._inflight.give_back(nbytes)

        receive.experimental_non_blocking = True  # type: ignore[attr-defined]
        return grpc.unary_stream_rpc_method_handler(receive, None, _serialize)


def _end(context: grpc.ServicerContext, send: Callable[[Any], None], error: KvdbError) -> None:
    """End the call, from whatever thread, with the status of an error."""
    set_status(context, error)
    send(None)


def _sessions(request: Any) -> list[str]:
    """The ids of the sessions that a request names."""
    fields = request.DESCRIPTOR.fields_by_name
    if "session_ids" in fields:
        return list(request.session_ids)
    return [request.session_id] if "session_id" in fields else []


def _serialize(reply: Message) -> bytes:
    return reply.SerializeToString()


class TokenCheck(grpc.ServerInterceptor):
    """Lets through calls that bring the token, and health checks, which need none."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refusal: Handler = grpc.unary_unary_rpc_method_handler(_refuse)

    def intercept_service(
        self, continuation: "Callable[[grpc.HandlerCallDetails], Handler | None]", details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        if details.method.startswith(HEALTH) or self._brings_token(details):
            return continuation(details)
        return self._refusal

    def _brings_token(self, details: grpc.HandlerCallDetails) -> bool:
        given = dict(details.invocation_metadata).get("authorization", "")
        raw = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(raw, self._expected)


def _refuse(_request: bytes, context: grpc.ServicerContext) -> bytes:
    abort(context, Unauthenticated("the call brings no token or a wrong one; pass the server's with connect(..., token=...)"))
