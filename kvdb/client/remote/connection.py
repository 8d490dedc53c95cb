"""One channel to one server. Every failure on it becomes an error of kvdb."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ipaddress import ip_address
from threading import RLock, local
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import Message

from kvdb.client.remote.alarm import Alarm
from kvdb.client.remote.fork_gate import GATE
from kvdb.client.remote.shared_memory.lanes import LocalServer, SharedLanes
from kvdb.client.remote.stream import Stream
from kvdb.client.remote.time_limits import TimeLimits
from kvdb.config import Timeouts, Tls
from kvdb.errors import InvalidArgument, KvdbError, MessageTooLarge, Unavailable
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.calls import OF_REQUEST, Stub
from kvdb.rpc.options import client_options
from kvdb.rpc.status import timings_in, to_error
from kvdb.types import CallTimings

ENVELOPE_BYTES_MAX = 64 << 10
"""Room in a message for everything beside arrays and tokens: names, shapes, a spec."""

PORT = 7700
CONNECT_SECONDS = 10.0
Request = TypeVar("Request")
Reply = TypeVar("Reply")


class Connection:
    """An open channel to a server that answered. Thread-safe.

    target: `kvdb://host:port`, `kvdbs://host:port` or `kvdb+unix:///path`. stub: its calls; make them through `call`.
    message_bytes_max: the largest message that the server takes, as it says first. payload_bytes_max: the largest arrays and
    tokens that fit into one; stream_payload_bytes_max: into a request of a stream, which may be several. stream_idle_seconds: how
    long the server lets a stream say nothing. lanes: the ways through shared memory, none where the server is on another host.
    direct: whether `Decode` may go through parts of gRPC that are not public. limits: how long each call may take. alarm: what
    ends calls of streams that take longer.
    """

    def __init__(self, target: str, token: str, timeouts: Timeouts, tls: Tls) -> None:
        """Raises InvalidArgument for an invalid target or token, ConfigError for certificates that cannot be read, Unavailable,
        Unauthenticated or ForkedProcess."""
        GATE.check()
        self.target = target
        self.metadata = metadata_of(token)
        self.direct = True
        self.limits = TimeLimits(timeouts)
        self.alarm = Alarm()
        self._closed = False
        self._last = local()
        self.channel = self._open_channel(tls)
        self.stub = Stub(self.channel)
        try:
            server = self._greet()
        except BaseException:
            self._close_channel()
            raise
        self.lanes = SharedLanes(server, self._greet, token, target, self.limits)

    def call(self, request: Message) -> Any:
        """The reply to the request of a unary call. Raises what the server raised, DeadlineExceeded, and Unavailable where it
        does not answer, or after `close`."""
        call = OF_REQUEST[type(request)]
        with self.errors_raised():
            reply, trailing = self._unary(getattr(self.stub, call.rpc), request, self.limits.group(call.group))
        self._keep(timings_in(trailing))
        return reply

    def stream(self, method: str, deserialize: Callable[[bytes], Reply]) -> Stream[bytes, Reply]:
        """Open a call of many requests, which are bytes, and replies. Raises Unavailable after `close`."""
        return Stream(self, self.channel.stream_stream(method, response_deserializer=deserialize))

    def replies(self, method: str, request: Any) -> Any:
        """Open a call with one request and many replies, which are bytes: an iterator that can be cancelled."""
        call: Any = self.channel.unary_stream(method, request_serializer=type(request).SerializeToString)
        return call(request, metadata=self.metadata)

    def lock(self) -> AbstractContextManager[Any]:
        """A lock under which a call may wait; its holder may take it again."""
        return RLock()

    def tidy(self, action: Callable[[], None]) -> None:
        """Carry out what ends something, from whatever thread."""
        action()

    def timed(self, queue_us: float, engine_us: float, kernel_us: float) -> None:
        """Keep what the server measured of this thread's last call on a session."""
        self._keep(CallTimings(queue_us / 1e6, engine_us / 1e6, kernel_us / 1e6))

    @property
    def last_timings(self) -> CallTimings | None:
        """What the server measured of this thread's last call, where that was no import and read no KV."""
        return getattr(self._last, "timings", None)

    @contextmanager
    def errors_raised(self) -> Iterator[None]:
        """Raise what the server raised in the body, and Unavailable where it does not answer, or after `close`."""
        try:
            yield
        except grpc.RpcError as failure:
            raise self.error(failure) from None
        except ValueError:  # by which gRPC says that the channel is closed
            if not self._closed:
                raise
            raise Unavailable("the database is closed; connect again") from None

    def error(self, failure: grpc.RpcError) -> KvdbError:
        """The error of kvdb that a failed call stands for."""
        return to_error(failure, self.target)

    def close(self) -> None:
        """Close the channel; calls under way fail."""
        self._closed = True
        self.lanes.close()
        self._close_channel()

    def take_limits(self, hello: pb.HelloReply) -> None:
        """Keep what the server says."""
        self.message_bytes_max: int = hello.message_bytes_max
        self.payload_bytes_max = self.message_bytes_max - ENVELOPE_BYTES_MAX
        self.stream_payload_bytes_max: int = hello.request_bytes_max - ENVELOPE_BYTES_MAX

    def check_size(self, what: str, nbytes: int) -> None:
        """Raises MessageTooLarge for more bytes than the server takes in one message."""
        self._check(what, nbytes, self.payload_bytes_max, "one message", "server.message_bytes_max")

    def check_stream_size(self, what: str, nbytes: int) -> None:
        """Raises MessageTooLarge for more bytes than the server takes in one request of a stream."""
        self._check(what, nbytes, self.stream_payload_bytes_max, "one request", "server.request_bytes_max")

    def _greet(self) -> LocalServer:
        """Ask the server for its limits, and where its local socket is. Raises what the server raised, and Unavailable."""
        seconds = min(CONNECT_SECONDS, self.limits.group("lookup"))
        with self.errors_raised():
            hello, _ = self._unary(self.stub.Hello, pb.HelloRequest(), seconds)
        self.take_limits(hello)
        self.stream_idle_seconds: float = hello.stream_idle_seconds
        return LocalServer(hello.local_socket if _is_local(self.target) else "", hello.local_server)

    def _unary(self, method: Any, request: object, seconds: float) -> tuple[Any, Any]:
        """The reply, and the metadata behind it. Raises RpcError."""
        with GATE:
            reply, ended = method.with_call(request, metadata=self.metadata, timeout=seconds)
        return reply, ended.trailing_metadata()

    def _keep(self, timings: CallTimings | None) -> None:
        self._last.timings = timings

    def _open_channel(self, tls: Tls) -> grpc.Channel:
        return open_channel(grpc, self.target, tls)

    def _close_channel(self) -> None:
        self.channel.close()

    def _check(self, what: str, nbytes: int, nbytes_max: int, where: str, setting: str) -> None:
        if nbytes > nbytes_max:
            raise MessageTooLarge(
                f"{what} has {nbytes:,} bytes; expected at most {nbytes_max:,} in {where} to {self.target}, "
                f"so send fewer tokens at a time or raise {setting}"
            )


def open_channel(kind: Any, target: str, tls: Tls) -> grpc.Channel:
    """kind: the module that makes it. Raises InvalidArgument, or ConfigError for certificates that cannot be read."""
    address, options = address_of(target), client_options()
    if not target.startswith("kvdbs:"):
        plain: grpc.Channel = kind.insecure_channel(address, options=options)
        return plain
    ca, key, cert = tls.read()
    safe: grpc.Channel = kind.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options)
    return safe


def address_of(target: str) -> str:
    """A target's address as gRPC writes it. Raises InvalidArgument."""
    try:
        parts = urlsplit(target)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidArgument(f"{target!r} names no server ({error}); expected kvdb://host:port") from None
    if parts.scheme == "kvdb+unix" and not parts.netloc and parts.path:
        return f"unix:{parts.path}"
    if parts.scheme not in {"kvdb", "kvdbs"} or not host or parts.path not in {"", "/"} or "@" in parts.netloc:
        raise InvalidArgument(f"{target!r} names no server; expected kvdb://host:port, kvdbs://host:port or kvdb+unix:///path")
    return f"[{host}]:{port or PORT}" if ":" in host else f"{host}:{port or PORT}"


def _is_local(target: str) -> bool:
    """Whether a valid target leads to this host, and memory may be shared with whoever answers there."""
    host = urlsplit(target).hostname
    if host is None or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def metadata_of(token: str) -> tuple[tuple[str, str], ...]:
    """The headers that carry a token. Raises InvalidArgument."""
    if not token.isascii() or (token and not token.isprintable()):
        raise InvalidArgument("the token holds characters that no header can carry; expected printable ASCII")
    return (("authorization", f"Bearer {token}"),) if token else ()
