"""The `Decode` call of one session, opened when it is needed."""

from contextlib import ExitStack
from time import monotonic
from typing import Protocol

from kvdb.client.remote.connection import Connection
from kvdb.client.remote.direct import DirectDecode, NotSent, available
from kvdb.client.remote.stream import DECODE
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.request_parts import cut

IDLE_SHARE = 0.5
"""A stream that was silent for this share of the time after which the server ends it is not used again."""


class Decode(Protocol):
    """An open `Decode` call."""

    @property
    def ended(self) -> bool: ...

    def exchange(self, request: bytes) -> pb.DecodeReply: ...

    def cancel(self) -> None: ...

    def expire(self) -> None: ...


class SessionStream:
    """A `Decode` call that is opened at the first request, and again after an error or a long silence. Not thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stream: Decode | None = None
        self._last_used = 0.0  # in seconds of the monotonic clock

    def exchange(self, data: bytes) -> pb.DecodeReply:
        """Send a request and wait for its reply. Raises what the server raised, DeadlineExceeded and Unavailable."""
        alarm = self._connection.alarm
        alarm.begin(self, self._connection.limits.group("attend"))
        try:
            return self._send(data)
        except NotSent:
            return self._send(data)
        finally:
            alarm.end(self)
            self._last_used = monotonic()

    def cancel(self) -> None:
        """End the call that is open, if one is."""
        if self._stream is not None:
            self._stream.cancel()

    def expire(self) -> None:
        """End the call that is open, from another thread, because it took too long."""
        if self._stream is not None:
            self._stream.expire()

    def _send(self, data: bytes) -> pb.DecodeReply:
        """Send a request, in pieces if it is larger than a message. The pieces of an unfinished request have no effect."""
        stream = self._open_stream()
        if len(data) <= self._connection.message_bytes_max:
            return stream.exchange(data)
        reply = pb.DecodeReply()
        with ExitStack() as unfinished:
            unfinished.callback(stream.cancel)  # also after an interrupt: the next request must not follow a piece
            for part in cut(data, self._connection.message_bytes_max):
                reply = stream.exchange(pb.DecodeRequest(part=part).SerializeToString())
            unfinished.pop_all()
        return reply

    def _open_stream(self) -> Decode:
        """The stream of the last call, or a new one if that has ended, or was silent so long that the server may end it."""
        stream = self._stream
        if stream is not None and not stream.ended:
            if monotonic() - self._last_used < self._connection.stream_idle_seconds * IDLE_SHARE:
                return stream
            stream.cancel()
        direct = DirectDecode.open(self._connection) if available(self._connection) else None
        self._stream = direct or self._connection.stream(DECODE, pb.DecodeReply.FromString)
        return self._stream
