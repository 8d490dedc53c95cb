"""A bidirectional call that one thread drives: it sends, receives and ends."""

from contextlib import AbstractContextManager
from queue import Full, Queue
from threading import Event
from time import monotonic
from typing import Generic, Protocol, TypeVar

import grpc

from kvdb.client.remote.alarm import Alarm
from kvdb.client.remote.time_limits import TimeLimits
from kvdb.errors import KvdbError, Unavailable
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.calls import OF_REQUEST
from kvdb.rpc.status import too_late

Request = TypeVar("Request")
Reply = TypeVar("Reply")

DECODE = OF_REQUEST[pb.DecodeRequest].path
DEPTH = 4
"""How many requests may wait to be sent before `send` waits too."""
LOOK_SECONDS = 0.2
"""How often a waiting `send` checks whether the call has ended."""


class Line(Protocol):
    """The connection of a stream, as `kvdb.client.remote.connection.Connection` is."""

    target: str
    metadata: tuple[tuple[str, str], ...]
    limits: TimeLimits
    alarm: Alarm

    def errors_raised(self) -> AbstractContextManager[None]: ...

    def error(self, failure: grpc.RpcError, /) -> KvdbError: ...


class Stream(Generic[Request, Reply]):
    """One open call. Not thread-safe.

    gRPC takes the requests from a thread of its own, through a short queue. A stream that failed has ended. Raises Unavailable
    for a connection that was closed.
    """

    def __init__(self, connection: Line, method: "grpc.StreamStreamMultiCallable[Request, Reply]") -> None:
        self._connection = connection
        self._requests: Queue[Request | None] = Queue(DEPTH)
        self._expired = False
        with connection.errors_raised():
            self._call = method(iter(self._requests.get, None), metadata=connection.metadata)

    @property
    def ended(self) -> bool:
        return not self._call.is_active()

    def send(self, request: Request) -> None:
        """Hand a request over. Raises the error that ended the call, if it has ended, and DeadlineExceeded where the server takes
        none for longer than `Timeouts.progress`."""
        end = monotonic() + self._connection.limits.group("progress")
        while not self.ended:
            if self._offer(request):
                return
            if monotonic() > end:
                self.expire()
        self.receive()

    def receive(self) -> Reply:
        """The next reply. Raises the error that ended the call, or Unavailable when the server ended it without one. How long it
        may take, the caller says to the connection's alarm."""
        done = False
        try:
            reply: Reply = next(self._call)
            done = True
        except grpc.RpcError as failure:
            raise too_late(self._connection.target) if self._expired else self._connection.error(failure) from None
        except StopIteration:
            raise Unavailable(f"the server at {self._connection.target} ended the call; connect again") from None
        finally:
            if not done:
                self.cancel()  # also after an interrupt: a reply that nobody waited for must not answer the next request
        return reply

    def exchange(self, request: Request) -> Reply:
        """Send a request and wait for its reply. Raises the error that ended the call."""
        self.send(request)
        return self.receive()

    def finish(self, seconds_max: float = 0.0) -> None:
        """Say that no more requests come, and wait that long for the server to end the call; then it is cancelled."""
        ended = Event()
        if not self._call.add_callback(ended.set):
            ended.set()
        self._end_requests()
        if not ended.wait(seconds_max):
            self.cancel()

    def cancel(self) -> None:
        """End the call now. On one that has ended it does nothing."""
        self._call.cancel()
        self._end_requests()

    def expire(self) -> None:
        """End the call, from another thread, because it took too long."""
        self._expired = True
        self._call.cancel()

    def _end_requests(self) -> None:
        """Let go of the thread that takes requests; one that finds the queue full finds the call ended when it comes back."""
        while not self._offer(None) and not self.ended:
            pass

    def _offer(self, request: Request | None) -> bool:
        try:
            self._requests.put(request, timeout=LOOK_SECONDS)
        except Full:
            return False
        return True
