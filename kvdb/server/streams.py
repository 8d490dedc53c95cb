"""The calls that hold a thread as long as they are open: their number is limited, and they can be ended early."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic

import grpc

from kvdb.errors import CapacityError, Unavailable
from kvdb.server.turns import Turn


class OpenStream:
    """One stream. session, turn: the id of the session it carries, once known, and what each of its requests waits for. finishes:
    whether it is let finish when the server drains, as an import is; other streams are ended between two requests then."""

    def __init__(self, context: grpc.ServicerContext, finishes: bool) -> None:
        self.context = context
        self.client = context.peer()
        self.finishes = finishes
        self.session = ""
        self.turn = Turn("", frozenset())
        self.busy = False
        self.ended = False
        self.used = monotonic()  # when the last request was answered


class Streams:
    """Every open stream. Thread-safe.

    streams_max: how many there may be. One client may have all but a quarter of them, so that it cannot keep the others out.
    idle_seconds: a stream that has said nothing for so long is ended.

    A decode stream spends most of its life waiting for its client. Such a one is cancelled when it is idle, when the server
    drains or when its session ends, and its client opens another if it needs one; a busy one answers first.
    """

    def __init__(self, streams_max: int, idle_seconds: float) -> None:
        self._streams_max = streams_max
        self._client_max = streams_max - streams_max // 4
        self._idle_seconds = idle_seconds
        self._open: set[OpenStream] = set()
        self._draining = False
        self._lock = Lock()

    @contextmanager
    def opened(self, context: grpc.ServicerContext, *, finishes: bool = False) -> Iterator[OpenStream]:
        """Count a stream while the body runs. Raises CapacityError or, when the server drains, Unavailable."""
        stream = OpenStream(context, finishes)
        with self._lock:
            if self._draining:
                raise Unavailable("the server is stopping; connect again when it has been started")
            self._check_room(stream.client)
            self._open.add(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self._open.discard(stream)

    def begin(self, stream: OpenStream) -> None:
        """A request has come and is being answered. Raises Unavailable for a stream that was ended just before."""
        with self._lock:
            if stream.ended:
                raise Unavailable("the server ended this stream before it read the request; open another")
            stream.busy = True

    def end(self, stream: OpenStream) -> bool:
        """The answer is on its way. Whether the stream may go on."""
        with self._lock:
            stream.busy = False
            stream.used = monotonic()
            return not self._draining or stream.finishes

    def session_ended(self, session: str) -> None:
        """Cancel the stream of a session that has ended."""
        with self._lock:
            ended = self._ended(stream for stream in self._open if stream.session == session)
        self._cancel(ended)

    def end_idle(self) -> None:
        """Cancel those that have said nothing for too long."""
        since = monotonic() - self._idle_seconds
        with self._lock:
            idle = self._ended(stream for stream in self._open if not stream.busy and stream.used < since)
        self._cancel(idle)

    def end_refused(self, lets_in: Callable[[grpc.ServicerContext], bool]) -> None:
        """Cancel those whose client is not let in any more, also while they answer."""
        with self._lock:
            known = list(self._open)
        refused = [stream for stream in known if not lets_in(stream.context)]
        with self._lock:
            ended = self._ended(iter(refused))
        self._cancel(ended)

    def drain(self) -> None:
        """Take no more streams, cancel those that wait, let the busy ones answer."""
        with self._lock:
            self._draining = True
            waiting = self._ended(stream for stream in self._open if not stream.busy and not stream.finishes)
        self._cancel(waiting)

    def _check_room(self, client: str) -> None:
        clients = [stream.client for stream in self._open if not stream.ended]
        if len(clients) >= self._streams_max:
            raise CapacityError(
                f"the server carries {self._streams_max} streams, as many as server.workers lets it; "
                "close sessions that decode no more, or raise server.workers"
            )
        if clients.count(client) >= self._client_max:
            raise CapacityError(
                f"this client has {self._client_max} streams open, and the rest of server.workers is for others; "
                "close sessions that decode no more, or raise server.workers"
            )

    def _ended(self, streams: Iterator[OpenStream]) -> list[OpenStream]:
        """Mark them, so that a request that comes now is not read, and they take no other's room until their threads end."""
        marked = list(streams)
        for stream in marked:
            stream.ended = True
        return marked

    def _cancel(self, streams: list[OpenStream]) -> None:
        for stream in streams:
            stream.context.cancel()
