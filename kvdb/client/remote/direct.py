"""A bidirectional call that runs in the caller's own thread.

gRPC's public API takes requests from one thread and hands replies over from another, which costs a decode step about 90 us of
the 250 that its round trip takes (`benchmarks/service.py`). `Decode` uses what lies below that API instead, the "segregated
call" with which gRPC itself runs calls in one thread. It is not public and may change: where the installed gRPC lacks it, or any
of it fails, `kvdb.client.remote.stream` takes over, through the public API, for the rest of the connection.
"""

from contextlib import suppress
from typing import Any

import grpc

from kvdb.client.remote.connection import Connection
from kvdb.client.remote.fork_gate import GATE
from kvdb.client.remote.stream import DECODE
from kvdb.errors import KvdbError, Unavailable
from kvdb.rpc import kvdb_pb2 as pb

try:
    from grpc._cython import cygrpc  # type: ignore[attr-defined]
except ImportError:
    cygrpc = None

FAILURES = (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors that a private part raises when it has changed."""
_BEGUN, _REPLIED, _ENDED = "begun", "replied", "ended"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class _Ended(grpc.RpcError):
    """The status that ended a call."""

    def __init__(self, status: Any) -> None:
        details = status.details()
        self._code = _CODES.get(status.code(), grpc.StatusCode.UNKNOWN)
        self._details = details.decode(errors="replace") if isinstance(details, bytes) else details
        self._trailing_metadata = status.trailing_metadata()

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing_metadata


class NotSent(Exception):
    """The private parts failed before a request was sent, so that it can be sent again in another way."""


class DirectDecode:
    """One open `Decode` call; `kvdb.client.remote.session.Decode`. Not thread-safe."""

    @classmethod
    def open(cls, connection: Connection) -> "DirectDecode | None":
        """Open a call; None if the private parts fail."""
        try:
            return cls(connection)
        except FAILURES:
            connection.direct = False
            return None

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._due = {_BEGUN, _ENDED}
        self._status: grpc.RpcError | None = None
        begin = (cygrpc.SendInitialMetadataOperation(connection.metadata, 0), cygrpc.ReceiveInitialMetadataOperation(0))
        end = (cygrpc.ReceiveStatusOnClientOperation(0),)
        self._call = connection.channel._channel.segregated_call(  # type: ignore[attr-defined]
            cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            DECODE.encode(),
            None,
            None,
            connection.metadata,
            None,
            ((begin, _BEGUN), (end, _ENDED)),
            None,
            None,
        )

    @property
    def ended(self) -> bool:
        """Whether the call has ended. When the server ends it, this shows only in the next exchange."""
        return _ENDED not in self._due

    def exchange(self, request: bytes) -> pb.DecodeReply:
        """Send a request and wait for its reply. Raises the error that ended the call, NotSent, or Unavailable where the private
        parts fail when the request may have been sent."""
        with GATE:
            return self._exchange(request)

    def _exchange(self, request: bytes) -> pb.DecodeReply:
        try:
            send = cygrpc.SendMessageOperation(request, 0)
            self._call.operate((send, cygrpc.ReceiveMessageOperation(0)), _REPLIED)
        except FAILURES as failure:
            self._give_up()
            raise NotSent from failure
        self._due.add(_REPLIED)
        try:
            return self._reply()
        except KvdbError:
            raise  # the call's own error, which may be a ValueError too
        except FAILURES as failure:
            self._give_up()
            raise Unavailable(
                f"the installed gRPC {grpc.__version__} failed while it waited for {self._connection.target} ({failure!r}); "
                "look at stats for what the session holds, and call again: the next call goes another way"
            ) from failure

    def _reply(self) -> pb.DecodeReply:
        reply = None
        try:
            while _REPLIED in self._due:
                reply = self._next() or reply
        finally:
            if reply is None:
                self.cancel()  # also after an interrupt: a reply that nobody waited for must not answer the next request
        if reply is None:
            assert self._status is not None
            raise self._connection.error(self._status)
        return pb.DecodeReply.FromString(reply[0])

    def cancel(self) -> None:
        """End the call now; after its end, this does nothing. If the private parts fail, the server ends the call, together with
        its session or because it is silent."""
        try:
            if self._due:
                self._call.cancel(grpc.StatusCode.CANCELLED.value[0], "ended by the client")
            while self._due:
                self._next()
        except FAILURES:
            self._give_up()

    def expire(self) -> None:
        """End the call, from another thread than the one that waits for it, because it took too long."""
        with suppress(*FAILURES):
            self._call.cancel(grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "the time of the call is over")

    def _give_up(self) -> None:
        """Stop using the private parts."""
        self._connection.direct = False
        self._due.clear()
        with suppress(*FAILURES):
            self._call.cancel(grpc.StatusCode.CANCELLED.value[0], "ended by the client")

    def _next(self) -> tuple[bytes] | None:
        """Wait for one event. Returns a reply in a tuple, because a reply may be empty, and None for any other event."""
        waited = False
        try:
            event = self._call.next_event()
            waited = True
        finally:
            if not waited:
                self._due.clear()  # an interrupt, upon which gRPC cancels and frees the call: it must not be touched again
        self._due.discard(event.tag)
        reply = None
        for operation in event.batch_operations:
            if operation.type() == cygrpc.OperationType.receive_status_on_client:
                self._status = _Ended(operation)
            elif operation.type() == cygrpc.OperationType.receive_message and operation.message() is not None:
                reply = (operation.message(),)
        return reply


def available(connection: Connection) -> bool:
    """Whether this gRPC has what `DirectDecode` is made of, and nothing of it has failed."""
    channel = getattr(connection.channel, "_channel", None)
    return connection.direct and cygrpc is not None and hasattr(channel, "segregated_call")
