"""One channel of asyncio to one server, for functions that are carried out in its event loop."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, cast
from weakref import WeakKeyDictionary

import grpc
import grpc.aio

from kvdb.client.remote.aio.calls import AsyncStream, LoopAlarm, Replies, outcome
from kvdb.client.remote.aio.carried import Turns, carried, is_carried
from kvdb.client.remote.connection import Connection, open_channel
from kvdb.client.remote.shared_memory.lanes import LocalServer
from kvdb.config import Timeouts, Tls
from kvdb.errors import ForkedProcess, KvdbError, Unavailable
from kvdb.types import CallTimings


class AsyncConnection(Connection):
    """An open channel to a server that answered, of one event loop. It shares no memory with the server, because waiting there
    would hold up the loop. Cancelling a task breaks its call off on the server too."""

    _process: int | None = None
    """In which asyncio first used gRPC."""

    def __init__(self, target: str, token: str, timeouts: Timeouts, tls: Tls) -> None:
        """Raises what `Connection` raises, and ForkedProcess in the child of a process that had one."""
        process = AsyncConnection._process = AsyncConnection._process or os.getpid()
        if process != os.getpid():  # gRPC's thread for asyncio is begun once, and is not there
            raise ForkedProcess(
                f"process {process} had a connection for asyncio when it was forked into this one, {os.getpid()}, where gRPC has "
                "none any more; use kvdb.connect here, or multiprocessing's spawn"
            )
        self._loop = asyncio.get_running_loop()
        self._timings: WeakKeyDictionary[asyncio.Task[Any], CallTimings | None] = WeakKeyDictionary()
        self._ending: set[asyncio.Task[None]] = set()  # the loop itself holds no task
        super().__init__(target, token, timeouts, tls)
        self.alarm = LoopAlarm()
        self.direct = False

    @property
    def last_timings(self) -> CallTimings | None:
        """What the server measured of this task's last call."""
        task = asyncio.current_task(self._loop)
        return None if task is None else self._timings.get(task)

    def lock(self) -> AbstractContextManager[Any]:
        """A lock under which a call may wait."""
        return Turns()

    def stream(self, method: str, deserialize: Callable[[bytes], Any]) -> AsyncStream[bytes, Any]:
        """Open a call of many requests, which are bytes, and replies."""
        return AsyncStream(self, cast(Any, self.channel).stream_stream(method, response_deserializer=deserialize))

    def replies(self, method: str, request: Any) -> Any:
        """Open a call with one request and many replies, which are bytes."""
        call: Any = self.channel.unary_stream(method, request_serializer=type(request).SerializeToString)
        return Replies[bytes](call(request, metadata=self.metadata))

    def tidy(self, action: Callable[[], None]) -> None:
        """Carry out what ends something, also from a thread that collects what was forgotten; there nobody waits for it."""
        if is_carried():
            action()
            return
        with suppress(RuntimeError):  # the loop is closed, and the channel with it
            self._loop.call_soon_threadsafe(self._begin, action)

    def close(self) -> None:
        """Close the channel, when what was forgotten has ended; calls under way fail."""
        if self._ending:
            outcome(asyncio.wait(self._ending))
        super().close()

    @contextmanager
    def errors_raised(self) -> Iterator[None]:
        """Raise what the server raised in the body, and Unavailable where it does not answer, or after `close`."""
        if self._closed:
            raise self._ended()
        with super().errors_raised():
            yield

    def error(self, failure: grpc.RpcError) -> KvdbError:
        """The error of kvdb that a failed call stands for."""
        return self._ended() if self._closed else super().error(failure)

    def _begin(self, action: Callable[[], None]) -> None:
        if self._closed:
            return
        task = self._loop.create_task(carried(action))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _unary(self, method: Any, request: object, seconds: float) -> tuple[Any, Any]:
        call = method(request, metadata=self.metadata, timeout=seconds)
        return outcome(call), outcome(call.trailing_metadata())

    def _keep(self, timings: CallTimings | None) -> None:
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._timings[task] = timings

    def _greet(self) -> LocalServer:
        return super()._greet()._replace(path="")

    def _open_channel(self, tls: Tls) -> grpc.Channel:
        return open_channel(grpc.aio, self.target, tls)

    def _close_channel(self) -> None:
        outcome(cast(Any, self.channel).close())

    @staticmethod
    def _ended() -> Unavailable:
        return Unavailable("the database is closed; connect again")
