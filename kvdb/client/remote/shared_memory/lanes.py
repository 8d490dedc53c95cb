"""The lanes of one connection: a call takes one that is free, or opens another, or waits for one."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from threading import Event, Lock
from time import monotonic, perf_counter
from typing import NamedTuple

from kvdb.client.remote.shared_memory.lane import SharedLane
from kvdb.client.remote.time_limits import TimeLimits
from kvdb.errors import KvdbError, Unavailable

LANES_MAX = 4
"""How many regions one connection has."""
WAIT_SECONDS = 0.1
"""How long a call waits for a region before it goes over gRPC, as where imports have them all. A step takes much less."""


AGAIN_SECONDS = 10.0
"""When a server that refused the first region is asked again: it may have had as many clients as it takes."""


class LocalServer(NamedTuple):
    """What a server says of its local socket. path: where it is, "" for nowhere. identity: which server this is."""

    path: str
    identity: bytes


class _Waiting(Event):
    """A call that waits for a lane."""

    lane: SharedLane | None = None


class SharedLanes:
    """Lanes to one server, also when it comes back as another process. Thread-safe. Calls that wait for one have it in the order
    in which they came. Where none can be opened, everything goes over gRPC for a while."""

    def __init__(self, server: LocalServer, find: Callable[[], LocalServer], token: str, target: str, limits: TimeLimits) -> None:
        """server: what it said last. find: asks it again; raises KvdbError. token: the client's. target: the server, for
        messages. limits: how long each call may take."""
        self.limits = limits
        self._server = server
        self._find = find
        self._token = token
        self._target = target
        self._free: list[SharedLane] = []
        self._waiting: deque[_Waiting] = deque()
        self._count = 0
        self._open = bool(server.path)
        self._again = -inf  # when another may be asked for, where there is none
        self._lock = Lock()
        self.refusal = "" if server.path else "the server offers none"

    def take(self) -> SharedLane | None:
        """A lane for one thread, to be given back; None where there is none."""
        with self._lock:
            while self._free:
                lane = self._free.pop()
                if lane.alive():
                    return lane
                lane.close()
                self._count -= 1
            if not self._open or (not self._count and monotonic() < self._again):
                return None
            if self._count < LANES_MAX:
                self._count += 1
                waiting = None
            else:
                waiting = _Waiting()
                self._waiting.append(waiting)
        return self._another() if waiting is None else self._wait(waiting)

    def give_back(self, lane: SharedLane) -> None:
        """Let others use the lane; one that broke, or whose requests wait for answers, is closed."""
        if not lane.broken and not lane.waiting:
            lane.rested = perf_counter()
            with self._lock:
                if self._waiting:
                    first = self._waiting.popleft()
                    first.lane = lane
                    first.set()
                    return
                if self._open:
                    self._free.append(lane)
                    return
        lane.close()
        with self._lock:
            self._count -= 1
            if self._waiting:
                self._waiting.popleft().set()  # it may open another

    def close(self) -> None:
        """Close the lanes that are free, and the others when they are given back."""
        with self._lock:
            self._open = False
            free, self._free = self._free, []
        for lane in free:
            lane.close()

    def _wait(self, waiting: _Waiting) -> SharedLane | None:
        told = waiting.wait(WAIT_SECONDS)
        with self._lock, suppress(ValueError):  # it was handed over meanwhile
            self._waiting.remove(waiting)
        return self.take() if told and waiting.lane is None else waiting.lane

    def _another(self) -> SharedLane | None:
        """A new lane, which is counted already."""
        try:
            return self._opened()
        except KvdbError as error:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._again, self.refusal = monotonic() + AGAIN_SECONDS, str(error)
            return None

    def _opened(self) -> SharedLane:
        """A new lane, to the server that is there now. Raises Unavailable, or what the server does."""
        server = self._server
        try:
            return SharedLane(*server, self._token, self._target)
        except Unavailable:
            found = self._find()
            if found == server or not found.path:
                raise
        self._server = found
        return SharedLane(*found, self._token, self._target)
