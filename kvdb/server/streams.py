"""The streams that are open, each of which holds a thread: how many there may be, and how they end early."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import grpc

from kvdb.errors import CapacityError, Unavailable


class OpenStream:
    """One stream. `session` is the id of the session it carries, once known."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self.context = context
        self.session = ""
        self.busy = False


class Streams:
    """Every open stream. Thread-safe.

    A decode stream spends most of its life waiting for its client. Such a one is cancelled when the server drains or its
    session ends, and its client opens another if it needs one; a busy one answers first.
    """

    def __init__(self, streams_max: int) -> None:
        self._streams_max = streams_max
        self._open: set[OpenStream] = set()
        self._draining = False
        self._lock = Lock()

    @contextmanager
    def entered(self, context: grpc.ServicerContext) -> Iterator[OpenStream]:
        """Counts while its body runs. Raises CapacityError or, when the server drains, Unavailable."""
        stream = OpenStream(context)
        with self._lock:
            if self._draining:
                raise Unavailable("the server is stopping; connect again when it has been started")
            if len(self._open) >= self._streams_max:
                raise CapacityError(
                    f"the server carries {self._streams_max} streams, as many as server.workers lets it; "
                    "close sessions that decode no more, or raise server.workers"
                )
            self._open.add(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self._open.discard(stream)

    def begin(self, stream: OpenStream) -> None:
        """A request is being answered."""
        stream.busy = True

    def end(self, stream: OpenStream) -> bool:
        """The answer is on its way. Whether the stream may go on."""
        stream.busy = False
        return not self._draining

    def session_ended(self, session: str) -> None:
        """Cancel what a session that is no more left open."""
        self._cancel([stream for stream in self._open_streams() if stream.session == session])

    def drain(self) -> None:
        """Take no more streams, cancel those that wait, let the busy ones answer."""
        with self._lock:
            self._draining = True
            waiting = [stream for stream in self._open if not stream.busy]
        self._cancel(waiting)

    def _open_streams(self) -> list[OpenStream]:
        with self._lock:
            return list(self._open)

    def _cancel(self, streams: list[OpenStream]) -> None:
        for stream in streams:
            stream.context.cancel()
