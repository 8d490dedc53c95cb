"""One client's region, and the thread that answers what comes through it."""

import logging
import os
import socket
import struct
from functools import partial
from threading import Thread

import kvdb._native as _native
import kvdb.deadlines as deadlines
from kvdb.errors import InvalidArgument, KvdbError, Unauthenticated
from kvdb.events import Origin, new_request, origin, originating
from kvdb.rpc.shared_records import (
    GOODBYE,
    HELLO,
    MAGIC,
    TOKEN,
    TOKEN_BYTES_MAX,
    SharedAnswer,
    SharedRequest,
    pack_answer,
    unpack_request,
)
from kvdb.rpc.shared_region import SharedRegion, create_region
from kvdb.rpc.status import class_of
from kvdb.server.interceptors import ErrorsTold
from kvdb.server.shared_memory.calls import SharedCalls
from kvdb.server.shared_memory.engine import Door, SharedEngine
from kvdb.server.shared_memory.prepared import PreparedAttend

HANDSHAKE_SECONDS = 5.0
LOOK_SECONDS = 0.5
"""How often a thread that waits for requests looks whether its client is still there."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid, as the system gives them
_log = logging.getLogger(__name__)


class Lane:
    """A client's connection. It starts at once, in a thread of its own, and ends with the socket or with `stop`.

    A client that closes its socket without a goodbye was killed: the sessions that it used are closed.
    """

    def __init__(self, peer: socket.socket, identity: bytes, door: Door) -> None:
        """identity: which server this is. door: whom it lets in."""
        self._peer = peer
        self._identity = identity
        self._door = door
        self._generation = int.from_bytes(os.urandom(8), "little")
        self._region: SharedRegion | None = None
        self._calls: SharedCalls | None = None
        self._stopping = False
        self._token: bytes | None = None
        self._thread = Thread(target=self._run, name="kvdb-shared-memory", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def importing(self) -> bool:
        """Whether an import is under way."""
        return self.alive and (calls := self._calls) is not None and calls.imports.busy

    def check(self) -> None:
        """Stop if the client would not be let in any more."""
        if self._token is not None and self.alive:
            try:
                self._door.engine_of(self._token)
            except Unauthenticated as refusal:
                _log.info("a client on this host is let in no more: %s", refusal)
                self.stop()

    def stop(self) -> None:
        """Answer the request that is under way, and then no more."""
        self._stopping = True
        if (region := self._region) is not None:
            region.ring.stop()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        _native.leave_processor()
        with self._peer:
            try:
                region, engine = self._shake_hands()
            except (OSError, Unauthenticated) as error:
                _log.info("a client on this host was refused: %s", error)
                return
            calls = SharedCalls(engine, region, self._generation)
            self._region, self._calls = region, calls
            killed = False
            try:
                with originating(Origin(engine.tenant)), deadlines.answering(self._waited_for):
                    killed = self._serve(region, calls)
            finally:
                calls.close()
                self._region = self._calls = None
                for session in calls.sessions_used if killed else ():
                    engine.sessions.close(session)

    def _shake_hands(self) -> tuple[SharedRegion, SharedEngine]:
        """Raises OSError or Unauthenticated."""
        self._peer.settimeout(HANDSHAKE_SECONDS)
        self._peer.sendall(HELLO.pack(MAGIC, self._identity))
        (length,) = TOKEN.unpack(_received(self._peer, TOKEN.size))
        if length > TOKEN_BYTES_MAX:
            raise Unauthenticated(f"its token has {length} bytes; expected at most {TOKEN_BYTES_MAX}")
        token = _received(self._peer, length)
        if not self._door.asks and user_of(self._peer) != os.geteuid():
            raise Unauthenticated("it belongs to another user")
        engine = self._door.engine_of(token)
        self._token = token
        descriptor = create_region()
        try:
            region = SharedRegion(descriptor, is_server=True)
            socket.send_fds(self._peer, [self._generation.to_bytes(8, "little")], [descriptor])
        finally:
            os.close(descriptor)
        self._peer.setblocking(False)
        return region, engine

    def _waited_for(self) -> bool:
        """Whether the client is still there."""
        try:
            self._peer.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _serve(self, region: SharedRegion, calls: SharedCalls) -> bool:
        """Answer until the client goes. Whether it went without a goodbye."""
        while not self._stopping:
            try:
                data = calls.native.receive(LOOK_SECONDS)
            except ValueError as error:  # no client of ours does so
                _log.warning("a client on this host was dropped: %s", error)
                return True
            if data is not None:
                answer = self._answer(region, calls, data)
                if answer is not None:
                    region.ring.send(pack_answer(answer))
                continue
            try:
                said = self._peer.recv(1)
            except BlockingIOError:
                continue
            except OSError:
                return True
            return said != GOODBYE
        return False

    def _answer(self, region: SharedRegion, calls: SharedCalls, came: PreparedAttend | bytes) -> SharedAnswer | None:
        """The answer to a request; None where it was sent already."""
        failed: list[KvdbError] = []
        whose = origin()
        with ErrorsTold("a call through shared memory", failed.append):
            if not isinstance(came, bytes) and came.answer(calls.native):
                return None
            request = unpack_request(calls.native.last)
            whose = whose._replace(request=f"{request.request:016x}" if request.request else new_request())
            if request.generation != self._generation:
                raise InvalidArgument("a request is of another generation; expected that of the region it came through")
            with originating(whose), deadlines.answering(self._waited_for, request.seconds):
                nbytes, queue, engine, kernel = calls.answer(request)
            return SharedAnswer(self._generation, request.number, "", nbytes, queue * 1e6, engine * 1e6, kernel * 1e6)
        if calls.native.answered:
            return None  # it went wrong behind the answer
        request = unpack_request(calls.native.last)
        calls.failed(request.kind, whose, failed[0])
        return self._failed(region, request, failed[0])

    def _failed(self, region: SharedRegion, request: SharedRequest, error: KvdbError) -> SharedAnswer:
        """The answer that tells an error, with its text in the reply where that has room."""
        text, nbytes = str(error).encode(errors="replace")[: request.reply_room], 0
        with ErrorsTold("a reply through shared memory", partial(_told, error)):
            region.write(request.reply, text)
            nbytes = len(text)
        return SharedAnswer(self._generation, request.number, class_of(error), nbytes)


def user_of(peer: socket.socket) -> int:
    """The number of the user at the other end."""
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _told(told: KvdbError, error: KvdbError) -> None:
    """The text of an error has no room in the region; its class tells enough."""
    _log.debug("%s has no room for its text: %s", told, error)


def _received(peer: socket.socket, nbytes: int) -> bytes:
    """So many bytes. Raises OSError where the peer goes before."""
    data = b""
    while len(data) < nbytes:
        piece = peer.recv(nbytes - len(data))
        if not piece:
            raise ConnectionResetError("it went during the handshake")
        data += piece
    return data
