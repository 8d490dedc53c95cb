"""The lanes of one connection: a call takes one that is free, or opens another."""

from contextlib import suppress
from threading import Lock

from kvdb.client.remote.shared_memory.lane import SharedLane
from kvdb.client.remote.time_limits import TimeLimits
from kvdb.errors import Unavailable

LANES_MAX = 4
"""How many regions one connection has; more calls at a time go over gRPC."""


class SharedLanes:
    """Lanes to one server. Thread-safe. Once no lane can be opened, there are none, and everything goes over gRPC."""

    def __init__(self, path: str, identity: bytes, token: str, target: str, limits: TimeLimits) -> None:
        """path: of the server's socket, "" for none. identity: what the server says of itself. token: the client's. target: the
        server, for messages. limits: how long each call may take."""
        self.limits = limits
        self._path = path
        self._identity = identity
        self._token = token
        self._target = target
        self._free: list[SharedLane] = []
        self._count = 0
        self._open = bool(path)
        self._lock = Lock()
        self.refusal = "" if path else "the server offers none"

    def take(self) -> SharedLane | None:
        """A lane for one thread, to be given back; None where there is none."""
        try:
            return self._free.pop()
        except IndexError:
            return self._another()

    def give_back(self, lane: SharedLane) -> None:
        """Let others use the lane; one that broke, or whose requests wait for answers, is closed."""
        if lane.broken or lane.waiting or not self._open:
            lane.close()
            with self._lock:
                self._count -= 1
        else:
            self._free.append(lane)

    def close(self) -> None:
        """Close the lanes that are free, and the others when they are given back."""
        self._open = False
        with suppress(IndexError):
            while True:
                self._free.pop().close()

    def _another(self) -> SharedLane | None:
        with self._lock:
            if not self._open or self._count >= LANES_MAX:
                return None
            self._count += 1
        try:
            return SharedLane(self._path, self._identity, self._token, self._target)
        except Unavailable as error:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._open, self.refusal = False, str(error)
            return None
