"""One region that the server shares with this client, and the requests that go through it."""

import os
import socket
from contextlib import suppress
from math import inf
from time import perf_counter
from typing import Any

import kvdb._native as _native
import kvdb.forks as forks
from kvdb.errors import KvdbError, Unavailable
from kvdb.rpc.shared_records import (
    GOODBYE,
    HELLO,
    MAGIC,
    TOKEN,
    CallKind,
    SharedAnswer,
    SharedRequest,
    address_of,
    pack_request,
    unpack_answer,
    unpack_request,
)
from kvdb.rpc.shared_region import SharedRegion
from kvdb.rpc.status import error_of, too_late

CONNECT_SECONDS = 5.0
LOOK_SECONDS = 0.02
"""How often a wait looks whether the server is still there, and lets an interrupt through."""
_GENERATION_BYTES = 8


class SharedLane:
    """An open region; used by one thread at a time. A lane that failed is `broken`, and has to be closed. region: the memory.

    Requests may be sent ahead of their answers, which come in the same order. rested: when its last user gave it back, in seconds
    of `time.perf_counter`.
    """

    def __init__(self, path: str, identity: bytes, token: str, target: str = "") -> None:
        """path, identity: what the server told of its socket. target: the server, for messages. Raises Unavailable where another
        server or none answers there, or it shares no memory with this client."""
        self.broken = False
        self._target = target
        self._sent = 0
        self._waiting: list[SharedRequest] = []
        self.rested = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        forks.in_child(self, SharedLane._forked)
        try:
            self._socket.settimeout(CONNECT_SECONDS)
            self._socket.connect(address_of(path))
            self.generation, self.region = self._shake_hands(identity, token)
            self._socket.setblocking(False)
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"the server's local socket {path} does not answer ({error.strerror or error})") from None
        except Unavailable:
            self._socket.close()
            raise

    def exchange(self, request: SharedRequest, seconds: float = inf) -> SharedAnswer:
        """Send a request and wait for its answer. Raises what the server raised, DeadlineExceeded and Unavailable."""
        self.send(request)
        return self.receive(seconds)

    def number(self) -> int:
        """The number of the next request."""
        self._sent += 1
        return self._sent

    def send(self, request: SharedRequest) -> None:
        """Send a request ahead. Raises Unavailable where too many wait."""
        if self.broken or not self.region.ring.send(pack_request(request)):
            self.broken = True
            raise Unavailable(f"the way through shared memory to the server at {self._target} is closed; connect again")
        self._waiting.append(request)

    def receive(self, seconds: float = inf) -> SharedAnswer:
        """The answer to the oldest request without one. Raises what the server raised, DeadlineExceeded where it takes longer
        than so many seconds, and Unavailable where the server is gone; then, and after an interrupt, the lane is broken, since
        the answer may still come."""
        request = self._waiting.pop(0)
        done = False
        try:
            answer = self._next(seconds)
            done = answer.number == request.number and answer.generation == self.generation
        finally:
            self.broken = self.broken or not done
        if not done or answer.reply_nbytes > request.reply_room:
            self.broken = True
            raise Unavailable("an answer through shared memory belongs to another request; connect again")
        if answer.error:
            raise self._error(request, answer)
        return answer

    def step(self, step: _native.SharedStep, q: Any, k: Any, v: Any, start: int | None, seconds: float) -> Any | None:
        """Send a step and wait for its answer. Returns the answer, as q, or the request where the answer came late and lies in
        the region; None for arrays of another form, and then nothing was sent. Raises what `exchange` raises."""
        wait = min(seconds, LOOK_SECONDS)
        done = False
        try:
            out = step.attend(self.region.ring, self.generation, self.number(), q, k, v, start, seconds, wait)
            done = True
        finally:
            self.broken = self.broken or not done
        if type(out) is bytes:
            out = unpack_request(out)
            self._waiting.append(out)
            self.receive(max(0.0, seconds - wait))
        return out

    def alive(self) -> bool:
        """Whether the server of a lane that nobody uses is there; shortly after its last use, this is taken for granted."""
        return perf_counter() - self.rested < LOOK_SECONDS or self._connected()

    @property
    def waiting(self) -> int:
        """How many requests have no answer yet."""
        return len(self._waiting)

    def close(self) -> None:
        """Say goodbye. Closing twice does nothing."""
        self.broken = True
        with suppress(OSError):
            self._socket.send(GOODBYE)
        self._socket.close()
        self.region.ring.stop()

    def _forked(self) -> None:
        """Leave the lane to the parent: the server is to see that it is gone when the parent is."""
        self.broken = True
        self._socket.close()

    def _next(self, seconds: float) -> SharedAnswer:
        data = self._take(min(seconds, LOOK_SECONDS))
        if data is not None:
            return unpack_answer(data)
        end = perf_counter() + seconds - LOOK_SECONDS
        while True:
            if perf_counter() >= end:
                raise too_late(self._target)
            connected = self._connected()  # before the ring: a server that ends answers first
            data = self._take(min(max(end - perf_counter(), 0.001), LOOK_SECONDS) if connected else 0.0)
            if data is not None:
                return unpack_answer(data)
            if connected:
                continue
            raise Unavailable(f"the server at {self._target} does not answer through shared memory any more; connect again")

    def _take(self, seconds: float) -> bytes | None:
        """The next answer, if it comes in time. Raises Unavailable for a ring that was written over."""
        try:
            return self.region.ring.receive(seconds)
        except ValueError as error:
            raise Unavailable(f"{error}; the server at {self._target} shares no memory any more; call again") from None

    def _connected(self) -> bool:
        """Whether the server holds its end of the socket, where it says nothing."""
        try:
            self._socket.recv(1)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _error(self, request: SharedRequest, answer: SharedAnswer) -> KvdbError:
        text = self.region.read(request.reply, answer.reply_nbytes).decode(errors="replace")
        return error_of(answer.error, text)

    def _shake_hands(self, identity: bytes, token: str) -> tuple[int, SharedRegion]:
        hello = self._socket.recv(HELLO.size, socket.MSG_WAITALL)
        if len(hello) != HELLO.size or HELLO.unpack(hello) != (MAGIC, identity):
            raise Unavailable("another server answers on the local socket")
        given = token.encode()
        self._socket.sendall(TOKEN.pack(len(given)) + given)
        data, descriptors, _, _ = socket.recv_fds(self._socket, _GENERATION_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if len(data) != _GENERATION_BYTES or len(descriptors) != 1:
                raise Unavailable("the server shares no memory with this client")
            return int.from_bytes(data, "little"), SharedRegion(descriptors[0], is_server=False)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def seconds_of_ping(lane: SharedLane) -> float:
    """How long one empty request takes. Raises Unavailable."""
    started = perf_counter()
    lane.exchange(SharedRequest(lane.generation, lane.number(), CallKind.PING))
    return perf_counter() - started
