"""The Unix socket through which clients of the same host come to share memory with the server.

By default it has a name that is in no folder, so that a server that is killed leaves nothing behind.
"""

import os
import secrets
import socket
import sys
from contextlib import suppress
from functools import partial
from threading import Thread
from time import monotonic, sleep

from kvdb.errors import ConfigError
from kvdb.rpc.shared_records import ABSTRACT, HELLO, MAGIC, address_of
from kvdb.server.shared_memory.engine import Door
from kvdb.server.shared_memory.lane import Lane, user_of

LANES_MAX = 32
"""How many regions there are at a time; who comes later is answered over gRPC."""
BACKLOG = 16
LOOK_SECONDS = 0.05
IDENTITY_BYTES = HELLO.size - len(MAGIC)


class SharedMemoryListener:
    """Answers on a Unix socket from `start` to `stop`. path: of the socket, "" where there is none. identity: random bytes that
    tell this server from others."""

    def __init__(self, setting: str, door: Door) -> None:
        """setting: as `ServerConfig.local_socket`. Raises ConfigError for a path where nobody can listen."""
        self.identity = secrets.token_bytes(IDENTITY_BYTES)
        self._own_user = setting == "auto"  # whoever runs the server comes in there, and root
        self._socket: socket.socket | None = None
        self._lanes: list[Lane] = []
        self._stopping = False
        self._lane = partial(Lane, identity=self.identity, door=door)
        self.path = self._listen(setting) if setting and sys.platform == "linux" else ""
        self._thread = Thread(target=self._accept, name="kvdb-local-socket", daemon=True)

    def start(self) -> None:
        if self._socket is not None:
            self._thread.start()

    def end_refused(self) -> None:
        """Let go of the clients that would not be let in any more."""
        for lane in self._lanes:
            lane.check()

    def drain(self) -> None:
        """Take no more clients, and answer no more requests but those under way and those of imports."""
        if self._socket is None or self._stopping:
            return
        self._stopping = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()
        for lane in self._lanes:
            if not lane.importing:
                lane.stop()

    def stop(self, grace: float) -> None:
        """Take no more clients, let imports go on for `grace` seconds, and end the rest after the request that is under way."""
        if self._socket is None:
            return
        self.drain()
        end = monotonic() + grace
        for lane in self._lanes:
            while lane.importing and monotonic() < end:
                sleep(LOOK_SECONDS)
            lane.stop()
        for lane in self._lanes:
            lane.join()
        if not self._own_user:
            with suppress(OSError):
                os.unlink(self.path)

    def _listen(self, setting: str) -> str:
        path = setting
        if self._own_user:
            path = ABSTRACT + "kvdb-" + secrets.token_hex(16)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(address_of(path))
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            if self._own_user:
                return ""
            raise ConfigError(f"server.local_socket is {path}, where the server cannot listen ({error.strerror})") from None
        self._socket = listening
        return path

    def _accept(self) -> None:
        assert self._socket is not None
        while not self._stopping:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            if self._own_user and user_of(peer) not in {os.geteuid(), 0}:
                peer.close()
                continue
            self._lanes = [lane for lane in self._lanes if lane.alive]
            if len(self._lanes) >= LANES_MAX:
                peer.close()
                continue
            self._lanes.append(self._lane(peer))
