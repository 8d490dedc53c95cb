"""One connection of the HTTP port: one request, one answer."""

import logging
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from socket import socket
from socketserver import BaseServer

from kvdb.server.http.places import PeerPlaces
from kvdb.server.http.routes import Reply
from kvdb.version import __version__

Answer = Callable[[str, Mapping[str, str]], Reply]
READ_SECONDS = 5.0
"""How long a client may say nothing in the middle of a request, or take nothing of an answer."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""What every answer says, where its route says nothing else."""

_log = logging.getLogger(__name__)


class HttpConnection(BaseHTTPRequestHandler):
    """Answers GET and HEAD by `answer`, which is given what was asked for and the headers; anything else is 501."""

    server_version = f"kvdb/{__version__}"
    sys_version = ""
    timeout = READ_SECONDS

    def __init__(self, answer: Answer, places: PeerPlaces, request: socket, address: object, server: BaseServer) -> None:
        self._answer = answer
        self._places = places
        super().__init__(request, address, server)  # which answers

    def do_GET(self) -> None:  # the standard library calls it so
        self._reply()

    def do_HEAD(self) -> None:
        self._reply()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        _log.debug(format, *args)

    def _reply(self) -> None:
        with self._places.answering(self.request):
            reply = self._answer(self.path, dict(self.headers.items()))
        self.send_response(reply.status)
        fixed = {"Content-Type": reply.kind, "Content-Length": str(len(reply.body))}
        for name, value in {**HEADERS, **fixed, **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(reply.body)
