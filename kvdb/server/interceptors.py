"""The edge of the service: messages come in as bytes, every error of a call becomes a status, and the token is checked."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from math import inf
from time import monotonic, perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

import kvdb.deadlines as deadlines
from kvdb.errors import CapacityError, InternalError, InvalidArgument, KvdbError, Unauthenticated
from kvdb.events import new_request, origin, originating
from kvdb.rpc.status import ENGINE_KEY, QUEUE_KEY, abort, set_status
from kvdb.server.admission.admission import Admission
from kvdb.server.admission.fair_queue import Work
from kvdb.server.inflight import InflightBytes
from kvdb.server.replies import Replies
from kvdb.server.turns import Turn, Turns

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

HEALTH = "/grpc.health.v1.Health/"
M = TypeVar("M", bound=Message)
Send = Callable[[bytes | None], None]
"""What sends a reply of a call that gave its thread back, and with None ends it."""

_log = logging.getLogger(__name__)


def parsed(kind: type[M], data: bytes) -> M:
    """The message of these bytes. Raises InvalidArgument."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"a message of {len(data)} bytes is no {kind.__name__}: {error}") from None


class ErrorsTold:
    """Hands what its body raises to `tell`, as an error of kvdb: a bug, of which the log has more, is an InternalError.

    A context manager by hand, because it stands in the way of every call.
    """

    __slots__ = ("_call", "_tell")

    def __init__(self, call: str, tell: Callable[[KvdbError], None]) -> None:
        self._call = call
        self._tell = tell

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or isinstance(error, grpc.RpcError):
            return False  # nothing, or the client is gone, which gRPC says by raising from its iterator of requests
        if isinstance(error, KvdbError):
            self._tell(error)
            return True
        whose = origin()
        request = whose.request or new_request()
        with originating(whose._replace(request=request)):
            _log.error("%s failed", self._call, exc_info=error)
        said = f"{type(error).__name__}: {error}"
        self._tell(InternalError(f"{self._call} met a bug of kvdb's: {said}; the server's log has more, by request_id {request}"))
        return True


def answering(context: grpc.ServicerContext) -> AbstractContextManager[None]:
    """For `with`: the body answers a call, and stops between two steps once that is broken off or its time is over."""
    return deadlines.answering(context.is_active, context.time_remaining())


def blocking(call: str, kind: type[M], behaviour: Callable[[M, grpc.ServicerContext], Any]) -> "Handler":
    """A unary method that keeps its thread until it has answered."""

    def guarded(data: bytes, context: grpc.ServicerContext) -> Any:
        with ErrorsTold(call, partial(abort, context)), answering(context):
            return behaviour(parsed(kind, data), context)

    return grpc.unary_unary_rpc_method_handler(guarded, None, _serialize)


def stream(call: str, behaviour: Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[Any]]) -> "Handler":
    """A bidirectional method, which takes its messages as bytes."""

    def guarded(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        with ErrorsTold(call, partial(abort, context)):
            yield from behaviour(requests, context)

    return grpc.stream_stream_rpc_method_handler(guarded, None, _serialize)


def replies(call: str, kind: type[M], behaviour: Callable[[M, grpc.ServicerContext], Iterator[bytes]]) -> "Handler":
    """A method that answers one message with several, which it gives as bytes."""

    def guarded(data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with ErrorsTold(call, partial(abort, context)):
            yield from behaviour(parsed(kind, data), context)

    return grpc.unary_stream_rpc_method_handler(guarded)


class UnaryCalls:
    """Unary methods that give their thread back while they wait for their turn.

    To gRPC such a method is one that streams a single reply, which may come from any thread; on the wire both are the same, and
    `Replies` sends it as a plain unary method would.
    """

    def __init__(self, submit: Callable[..., object], turns: Turns, admission: Admission, inflight: InflightBytes) -> None:
        """submit: hands work to a thread of the pool."""
        self._submit = submit
        self._turns = turns
        self._admission = admission
        self._inflight = inflight
        self._replies = Replies()

    def handler(
        self,
        call: str,
        kind: type[M],
        behaviour: Callable[[M, grpc.ServicerContext], Any],
        work_of: Callable[[M], Work] | None = None,
    ) -> "Handler":
        """The method of a call: it has its turn when no other call uses the sessions that its request names, and the engine has
        room for it. work_of: what it asks of the engine, None for what takes little of it."""
        sessions_of = _sessions_in(kind)

        def receive(data: bytes, context: grpc.ServicerContext, send: Send) -> None:
            with ErrorsTold(call, partial(_end, context, send)):
                request = parsed(kind, data)
                waiting = _Waiting(call, partial(behaviour, request), context, send, Turn(context.peer(), sessions_of(request)))
                if work_of is not None:
                    waiting.work = work_of(request)._replace(due=monotonic() + (context.time_remaining() or inf))
                waiting.nbytes = self._inflight.take(waiting.turn.client, len(data))
                try:
                    now = self._turns.begin(waiting.turn, lambda: self._turn_came(waiting))
                except CapacityError:
                    self._inflight.give_back(waiting.turn.client, waiting.nbytes)
                    raise
                if now and self._admits(waiting):
                    self._answer(waiting)

        receive.experimental_non_blocking = True  # type: ignore[attr-defined]
        return grpc.unary_stream_rpc_method_handler(receive)

    def _turn_came(self, waiting: "_Waiting") -> None:
        """Go on in a thread of the pool, when the engine has room."""
        if self._admits(waiting):
            self._go_on(waiting)

    def _admits(self, waiting: "_Waiting") -> bool:
        """Whether the engine has room now. Where too many wait for it, the call is told so, in a thread of the pool."""
        if waiting.work is None:
            return True
        try:
            waiting.queued = perf_counter()
            return self._admission.begin(waiting.work, partial(self._go_on, waiting))
        except CapacityError as refusal:
            waiting.work, waiting.refusal = None, refusal
            self._go_on(waiting)
            return False

    def _go_on(self, waiting: "_Waiting") -> None:
        self._submit(waiting.whose.run, self._answer, waiting)

    def _answer(self, waiting: "_Waiting") -> None:
        context, turn = waiting.context, waiting.turn
        with ErrorsTold(waiting.call, partial(_end, context, waiting.send)):
            try:
                if waiting.refusal is not None:
                    raise waiting.refusal
                if waiting.queued is not None:
                    self._admission.waited(perf_counter() - waiting.queued)
                began = perf_counter()
                with answering(context):
                    reply = _serialize(waiting.behaviour(context)) if context.is_active() else b""
                context.set_trailing_metadata(_timings(waiting.came, began, perf_counter()))
            finally:  # before the client hears, lest its next call find the session busy
                if waiting.work is not None:
                    self._admission.end(waiting.work)
                self._turns.end(turn)
                self._inflight.give_back(turn.client, waiting.nbytes)
            self._replies.send(context, waiting.send, reply)


class _Waiting:
    """A unary call on its way. nbytes: counted of it in flight. work: what it asks of the engine, None for little. refusal: why
    it is not carried out. queued: when it began to wait for the engine, None where it did not."""

    def __init__(
        self,
        call: str,
        behaviour: Callable[[grpc.ServicerContext], Any],
        context: grpc.ServicerContext,
        send: Send,
        turn: Turn,
    ) -> None:
        self.call = call
        self.behaviour = behaviour
        self.context = context
        self.send = send
        self.turn = turn
        self.whose = copy_context()
        self.came = perf_counter()
        self.nbytes = 0
        self.work: Work | None = None
        self.refusal: CapacityError | None = None
        self.queued: float | None = None


def _timings(came: float, began: float, ended: float) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of a call that was answered. Times are in seconds."""
    return (QUEUE_KEY, str(round((began - came) * 1e6))), (ENGINE_KEY, str(round((ended - began) * 1e6)))


def _end(context: grpc.ServicerContext, send: Send, error: KvdbError) -> None:
    """End the call, from whatever thread, with the status of an error."""
    set_status(context, error)
    send(None)


def _sessions_in(kind: type[Message]) -> Callable[[Any], frozenset[str]]:
    """The function that finds the ids of sessions in a request of this kind."""
    fields = kind.DESCRIPTOR.fields_by_name
    if "session_ids" in fields:
        return lambda request: frozenset(request.session_ids)
    if "session_id" in fields:
        return lambda request: frozenset((request.session_id,))
    return lambda _request: frozenset()


def _serialize(reply: Message) -> bytes:
    return reply.SerializeToString()


class TokenCheck(grpc.ServerInterceptor):
    """Lets through calls whose headers do, and health checks, which need none. lets_in: whether headers do."""

    def __init__(self, lets_in: Callable[[Mapping[str, Any]], bool]) -> None:
        self._lets_in = lets_in
        self._refusal: Handler = grpc.unary_unary_rpc_method_handler(_refuse)

    def intercept_service(
        self, continuation: "Callable[[grpc.HandlerCallDetails], Handler | None]", details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        if details.method.startswith(HEALTH) or self._lets_in(dict(details.invocation_metadata)):
            return continuation(details)
        return self._refusal


def _refuse(_request: bytes, context: grpc.ServicerContext) -> bytes:
    abort(context, Unauthenticated("the call brings no token or a wrong one; pass the server's with connect(..., token=...)"))
