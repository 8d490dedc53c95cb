"""A TCP proxy between a client and a server, which makes faults of the network."""

import socket
from contextlib import suppress
from threading import Thread


class Proxy:
    """Forwards connections to `port` of 127.0.0.1 until it is told otherwise; for `with`.

    target: where clients find it.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.target = f"kvdb://127.0.0.1:{self._door.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._stalled: set[socket.socket] = set()
        self._threads: list[Thread] = []

    def __enter__(self) -> "Proxy":
        self._go(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.reset()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def stall(self) -> None:
        """Forward nothing any more on what is connected, and close nothing: both sides believe that the other is there. New
        connections work."""
        self._stalled.update(self._ends)

    def reset(self) -> None:
        """End every connection at once, as the system does for a process that is killed. New ones work."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _go(self, work, *arguments) -> None:
        thread = Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                self._go(self._forward, near, far)
                self._go(self._forward, far, near)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if source not in self._stalled:
                    sink.sendall(data)
        if source not in self._stalled:
            with suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)
