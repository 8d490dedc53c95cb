"""The HTTP port: who may ask, how many at a time and for how long."""

import socket
from functools import partial
from http.server import ThreadingHTTPServer
from ssl import SSLContext
from threading import Thread
from time import monotonic
from typing import Any

from kvdb.errors import ConfigError
from kvdb.server.http.answering import Pages
from kvdb.server.http.connection import HttpConnection
from kvdb.server.http.places import PeerPlaces, shut

LOOK_SECONDS = 0.2
QUEUE_MAX = 1024
"""Connections that the kernel keeps until they are accepted. Where they are more, it lets a client try again a second later."""


class Listener(ThreadingHTTPServer):
    """The standard library's server with bounds."""

    daemon_threads = True
    block_on_close = False  # they are closed by `end_late`
    allow_reuse_address = True
    request_queue_size = QUEUE_MAX

    def __init__(self, host: str, port: int, pages: Pages, tls: SSLContext | None) -> None:
        self._tls = tls
        self.places = PeerPlaces()
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        super().__init__((str(address[0]), int(address[1])), partial(HttpConnection, pages.answer, self.places))

    def server_bind(self) -> None:
        """Bind without a look-up of the machine's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. The handshake of TLS comes with the first byte that its own thread reads: nobody is kept
        waiting."""
        connection, address = super().get_request()
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.places.take(request, str(client_address[0])):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or was too slow is nothing to tell: whatever goes wrong in an answer is told there."""

    def service_actions(self) -> None:
        """Called between two requests, and regularly."""
        self.places.end_late(monotonic())


class HttpPort:
    """A listener in a thread of its own. url: where it is found."""

    def __init__(self, host: str, port: int, pages: Pages, tls: SSLContext | None = None) -> None:
        """Take the port. Raises ConfigError where that is not possible."""
        try:
            self._listener = Listener(host, port, pages, tls)
        except OSError as error:
            raise ConfigError(f"metrics.port: the server cannot listen on {host}:{port} ({error.strerror})") from None
        taken = self._listener.server_address
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http{'' if tls is None else 's'}://{shown}:{taken[1]}"
        self._thread = Thread(target=self._listener.serve_forever, args=(LOOK_SECONDS,), name="kvdb-http", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more connections, and end those that are open."""
        if self._thread.ident is not None:
            shut(self._listener.socket)  # or its thread looks a moment later whether it is to end
            self._listener.shutdown()
            self._thread.join()
        self._listener.server_close()
        self._listener.places.end_late(float("inf"))
