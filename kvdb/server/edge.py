"""The RPC edge: whatever a call raises becomes a status here, and who may call is checked here."""

import hmac
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from kvdb.errors import InternalError, KvdbError, Unauthenticated
from kvdb.rpc.status import abort

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

HEALTH = "/grpc.health.v1.Health/"

_log = logging.getLogger(__name__)


@contextmanager
def errors_as_statuses(context: grpc.ServicerContext, call: str) -> Iterator[None]:
    """End the call with the status of what its body raises; a bug is logged and told as InternalError."""
    try:
        yield
    except KvdbError as error:
        abort(context, error)
    except grpc.RpcError:
        raise  # the client is gone, which gRPC says by raising from its iterator of requests
    except Exception as error:
        _log.exception("%s failed", call)
        abort(context, InternalError(f"{call} met a bug of kvdb's: {type(error).__name__}: {error}; the server's log has more"))


def unary(call: str, behaviour: Callable[[Any, grpc.ServicerContext], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
    """A unary method whose errors become statuses."""

    def guarded(request: Any, context: grpc.ServicerContext) -> Any:
        with errors_as_statuses(context, call):
            return behaviour(request, context)

    return guarded


def stream(
    call: str, behaviour: Callable[[Iterator[Any], grpc.ServicerContext], Iterator[Any]]
) -> Callable[[Iterator[Any], grpc.ServicerContext], Iterator[Any]]:
    """A bidirectional method whose errors become statuses."""

    def guarded(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        with errors_as_statuses(context, call):
            yield from behaviour(requests, context)

    return guarded


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
