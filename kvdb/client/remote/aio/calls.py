"""Calls of gRPC's for asyncio, in the form of those that wait in their thread."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

import grpc
import grpc.aio

from kvdb.client.remote.aio.carried import wait
from kvdb.client.remote.alarm import Alarm, Expiring
from kvdb.client.remote.stream import Line, Stream

Request = TypeVar("Request")
Reply = TypeVar("Reply")
T = TypeVar("T")


class Ended(grpc.RpcError):
    """A call that was ended on this side, though its task was not cancelled."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        return "the call was ended"

    def trailing_metadata(self) -> Any:
        return ()


def outcome(step: Awaitable[T]) -> T:
    """The outcome of one step of a call. Raises RpcError, and CancelledError for a task that is cancelled: gRPC raises it for any
    call that is."""
    try:
        return wait(step)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Ended from None


class Replies(Generic[Reply]):
    """The replies of a call, one after the other."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Reply:
        """Raises RpcError, or CancelledError."""
        reply = outcome(self.call.read())
        if reply is grpc.aio.EOF:
            raise StopIteration
        given: Reply = reply
        return given

    def is_active(self) -> bool:
        return not self.call.done()

    def cancel(self) -> bool:
        """End the call now; whether it had not ended."""
        cancelled: bool = self.call.cancel()
        return cancelled


class AsyncStream(Stream[Request, Reply]):
    """One open call, without a queue and without a thread that takes from it."""

    def __init__(self, connection: Line, method: Any) -> None:
        self._connection = connection
        self._expired = False
        with connection.errors_raised():
            self._call: Any = Replies(method(metadata=connection.metadata))

    def send(self, request: Request) -> None:
        """Hand a request over; see `Stream.send`."""
        if not self.ended:
            with suppress(grpc.RpcError, asyncio.InvalidStateError):  # it has ended; `receive` says why
                with self._connection.alarm.within(self, self._connection.limits.group("progress")):
                    outcome(self._call.call.write(request))
                return
        self.receive()

    def finish(self, seconds_max: float = 0.0) -> None:
        """Say that no more requests come; see `Stream.finish`."""
        with suppress(grpc.RpcError, asyncio.InvalidStateError), self._connection.alarm.within(self, seconds_max):
            outcome(self._call.call.done_writing())
            outcome(self._call.call.code())
        self.cancel()

    def cancel(self) -> None:
        """End the call now. On one that has ended it does nothing."""
        self._call.cancel()


class LoopAlarm(Alarm):
    """An alarm of the event loop's, without a thread."""

    def __init__(self) -> None:
        self._timers: dict[Expiring, list[asyncio.TimerHandle]] = {}

    def begin(self, call: Expiring, seconds: float) -> None:
        """Expire the call unless `end` comes in so many seconds; one step may be part of another."""
        self._timers.setdefault(call, []).append(asyncio.get_running_loop().call_later(seconds, call.expire))

    def end(self, call: Expiring) -> None:
        """The step of the call that was begun last is over in time."""
        timers = self._timers[call]
        timers.pop().cancel()
        if not timers:
            del self._timers[call]
