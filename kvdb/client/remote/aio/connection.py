"""One channel of asyncio to one server. Every failure on it becomes an error of kvdb."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from kvdb.client.remote.connection import CONNECT_SECONDS, address_of, metadata_of
from kvdb.client.remote.message_limits import MessageLimits
from kvdb.client.remote.time_limits import TimeLimits
from kvdb.config import Timeouts, Tls
from kvdb.errors import Unavailable
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.kvdb_pb2_grpc import KvdbStub
from kvdb.rpc.options import client_options
from kvdb.rpc.status import to_error, too_late

T = TypeVar("T")


class AsyncConnection(MessageLimits):
    """An open channel to a server that answered, of one event loop. limits: how long each call may take."""

    def __init__(self, target: str, token: str, timeouts: Timeouts, tls: Tls) -> None:
        """Raises InvalidArgument for an invalid target or token, and ConfigError."""
        self.target = target
        self.metadata = metadata_of(token)
        self.limits = TimeLimits(timeouts)
        self.closed = False
        self.channel = _channel(target, tls)
        self.stub: Any = KvdbStub(self.channel)

    @classmethod
    async def open(cls, target: str, token: str, timeouts: Timeouts, tls: Tls) -> Self:
        """Raises Unavailable or Unauthenticated too."""
        connection = cls(target, token, timeouts, tls)
        try:
            with connection.errors_raised():
                seconds = min(CONNECT_SECONDS, connection.limits.group("lookup"))
                connection.take_limits(
                    await connection.stub.Hello(pb.HelloRequest(), metadata=connection.metadata, timeout=seconds)
                )
        except BaseException:
            await connection.close()
            raise
        return connection

    async def call(self, method: Callable[..., Awaitable[T]], request: object) -> T:
        """Make one unary call. Raises what the server raised, DeadlineExceeded, and Unavailable where it does not answer, or
        after `close`. Cancelling its task breaks it off on the server too."""
        with self.errors_raised():
            return await method(request, metadata=self.metadata, timeout=self.limits.of(request))

    async def in_time(self, group: str, step: Awaitable[T]) -> T:
        """The outcome of one step of a stream. Raises DeadlineExceeded where it takes longer than its group may."""
        with self.errors_raised():
            try:
                async with asyncio.timeout(self.limits.group(group)):
                    return await step
            except TimeoutError:
                raise too_late(self.target) from None

    @contextmanager
    def errors_raised(self) -> Iterator[None]:
        """Raise what the server raised in the body, and Unavailable where it does not answer, or after `close`."""
        if self.closed:
            raise Unavailable("the database is closed; connect again")
        try:
            yield
        except grpc.RpcError as failure:
            raise to_error(failure, self.target) from None

    async def close(self) -> None:
        """Close the channel; calls under way fail. Closing twice does nothing."""
        self.closed = True
        await self.channel.close()


def _channel(target: str, tls: Tls) -> grpc.aio.Channel:
    """Raises InvalidArgument, or ConfigError for certificates that cannot be read."""
    address, options = address_of(target), client_options()
    if not target.startswith("kvdbs:"):
        return grpc.aio.insecure_channel(address, options=options)
    ca, key, cert = tls.read()
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options)
