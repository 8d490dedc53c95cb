"""The connections of the HTTP port: how many there are, how long each may last, and which gives way to a new one."""

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from time import monotonic

CONNECTIONS_MAX = 64
"""Connections at a time, each of which has a thread. For one more, one that waits for its client gives way."""
HEAD_SECONDS = 5.0
"""How long a client may take for the whole of its request."""
CONNECTION_SECONDS = 30.0
"""How long one connection may last, however slowly its client reads."""


@dataclass
class _Place:
    peer: str
    since: float
    asked: bool = False  # whether its request has come, whole
    answering: bool = False  # whether it waits for the server, not for its client


class PeerPlaces:
    """Places for connections, of which a probe always finds one: whoever holds most of them gives way, so that a client that
    opens connections and leaves them takes places from itself."""

    def __init__(self) -> None:
        self._open: dict[socket.socket, _Place] = {}  # the oldest first
        self._lock = Lock()

    def take(self, connection: socket.socket, peer: str) -> bool:
        """A place for a new connection of the address `peer`; another may be ended for it. False where every one is being
        answered."""
        with self._lock:
            if len(self._open) >= CONNECTIONS_MAX and not self._end_one():
                return False
            self._open[connection] = _Place(peer, monotonic())
        return True

    def leave(self, connection: socket.socket) -> None:
        """Its connection has ended."""
        with self._lock:
            self._open.pop(connection, None)

    @contextmanager
    def answering(self, connection: socket.socket) -> Iterator[None]:
        """The request has come, and its answer is computed inside. Raises ConnectionAbortedError where it had to give way."""
        with self._lock:
            place = self._open.get(connection)
            if place is None:
                raise ConnectionAbortedError
            place.asked = place.answering = True
        try:
            yield
        finally:
            with self._lock:
                place.answering = False

    def end_late(self, now: float) -> None:
        """End those that should have ended before `now`, in seconds of `time.monotonic`; their threads end with them."""
        with self._lock:
            for connection, place in self._open.items():
                if place.since + (CONNECTION_SECONDS if place.asked else HEAD_SECONDS) < now:
                    shut(connection)

    def _end_one(self) -> bool:
        held = Counter(place.peer for place in self._open.values())
        waiting = [(connection, place) for connection, place in self._open.items() if not place.answering]
        if not waiting:
            return False
        # Of those that are equal `max` takes the first, which is the oldest.
        chosen, _ = max(waiting, key=lambda one: (held[one[1].peer], not one[1].asked))
        del self._open[chosen]
        shut(chosen)
        return True


def shut(connection: socket.socket) -> None:
    """End what is sent and received, also under a thread that waits for it."""
    with suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)
