"""From what is asked over HTTP to what is answered: the token, the route, and errors."""

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from threading import BoundedSemaphore

from kvdb.errors import KvdbError, NotFound
from kvdb.server.http.host_names import HostNames
from kvdb.server.http.routes import Reply, Request, Route, Routes

Allows = Callable[[str], bool]
"""Whether the value of an Authorization header, "" for none, lets its sender in."""

AT_A_TIME_MAX = 16
"""Answers that are computed at a time, beside those to probes, which always find a place."""

_log = logging.getLogger(__name__)


class Pages:
    """The routes of a port and who may see them. names: under which it answers, None for every name."""

    def __init__(self, routes: Routes, allows: Allows, names: HostNames | None = None) -> None:
        self._routes = routes
        self._allows = allows
        self._names = names
        self._free = BoundedSemaphore(AT_A_TIME_MAX)

    def answer(self, target: str, headers: Mapping[str, str]) -> Reply:
        """The answer to a request for `target`, a path with or without a query; errors are answers too."""
        try:
            request = Request.of(target, headers)
        except ValueError:
            return Reply.text("this is no path", HTTPStatus.BAD_REQUEST)
        if self._names is not None and not self._names.know(request.headers.get("host", "")):
            said = "this is no name of this server; ask by its address, or add the name to metrics.host_names"
            return Reply.text(said, HTTPStatus.MISDIRECTED_REQUEST)
        route = self._routes.find(request.path)
        if not (route is not None and route.public) and not self._allows(request.headers.get("authorization", "")):
            said = "expected the token of the server as Authorization: Bearer"
            return Reply.text(said, HTTPStatus.UNAUTHORIZED, {"WWW-Authenticate": 'Bearer realm="kvdb"'})
        if route is None:
            return Reply.text("there is no such page", HTTPStatus.NOT_FOUND)
        return _of(route, request) if route.probe else self._in_turn(route, request)

    def _in_turn(self, route: Route, request: Request) -> Reply:
        if not self._free.acquire(blocking=False):
            said = f"{AT_A_TIME_MAX} requests are being answered; ask again in a second"
            return Reply.text(said, HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "1"})
        try:
            return _of(route, request)
        finally:
            self._free.release()


def _of(route: Route, request: Request) -> Reply:
    try:
        return route.handler(request)
    except NotFound as error:
        return Reply.text(str(error), HTTPStatus.NOT_FOUND)
    except KvdbError as error:
        return Reply.text(str(error), HTTPStatus.BAD_REQUEST)
    except Exception:
        _log.exception("GET %s failed", request.path)
        return Reply.text("kvdb met a bug; the server's log has more", HTTPStatus.INTERNAL_SERVER_ERROR)
