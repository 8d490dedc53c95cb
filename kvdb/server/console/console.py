"""Answers requests below /ui: the files of the pages, and what they show."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from math import isfinite
from threading import Lock
from typing import Any

import kvdb.server.console.api as api
from kvdb.errors import (
    CapacityError,
    InvalidArgument,
    KvdbError,
    NotFound,
    SessionClosed,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from kvdb.server.console.access import View, ViewOf, credential_of
from kvdb.server.http.routes import JSON, Reply, Request, Route
from kvdb.server.tenancy.tenants import AnyDatabase

ROOT = "/ui"
FILES = f"{ROOT}/"
API = f"{ROOT}/api/"
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
SAFE = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer: nothing from elsewhere is loaded, run, or told, and no other page shows this one."""
STATUS: Mapping[type, HTTPStatus] = {
    Unauthenticated: HTTPStatus.UNAUTHORIZED,
    InvalidArgument: HTTPStatus.BAD_REQUEST,
    NotFound: HTTPStatus.NOT_FOUND,
    SessionClosed: HTTPStatus.NOT_FOUND,
    Unsupported: HTTPStatus.CONFLICT,
    CapacityError: HTTPStatus.TOO_MANY_REQUESTS,
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
}
DIGITS_MAX = 9
SHOWN_MAX = 40
"""The most characters of a wrong value that an error repeats."""

_log = logging.getLogger(__name__)


class Console:
    """The console over a database. Its files are for everybody, what they show is for whom `view_of` lets in. Thread-safe."""

    def __init__(self, view_of: ViewOf) -> None:
        self._view_of = view_of
        self._explaining = Lock()
        self._calls: Mapping[str, Callable[[View, Mapping[str, str]], api.Json]] = {
            "overview": lambda view, _: api.overview(view.database),
            "calls": lambda view, _: api.calls(view.calls),
            "contexts": lambda view, query: _contexts(view.database, query),
            "context": lambda view, query: api.context(view.database, _text(query, "name")),
            "heat": lambda view, query: api.heat(view.database, _text(query, "name"), query.get("measure", "retrieved")),
            "sessions": lambda view, _: api.sessions(view.database),
            "explain": lambda view, query: self._explain(view.database, query),
        }

    def routes(self) -> Sequence[Route]:
        """Where an HTTP port finds it. None asks for the port's own token: calls ask `view_of`."""
        return (
            Route(ROOT, _to_files, public=True),
            Route(FILES, _file, public=True),
            Route(API, self._answer, public=True),
        )

    def _answer(self, request: Request) -> Reply:
        call = request.path.removeprefix(API)
        try:
            view = self._view_of(credential_of(request.headers.get("authorization", "")))
            if call not in self._calls:
                raise NotFound(f"there is no such call; expected one of {', '.join(self._calls)}")
            return _told(HTTPStatus.OK, self._calls[call](view, request.query))
        except KvdbError as error:
            status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), HTTPStatus.INTERNAL_SERVER_ERROR)
            return _told(status, {"error": str(error)})
        except Exception as error:
            _log.exception("%s failed", request.path)
            said = f"kvdb met a bug ({type(error).__name__}); the server's log has more"
            return _told(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": said})

    def _explain(self, database: AnyDatabase, query: Mapping[str, str]) -> api.Json:
        """One at a time, for carrying out a plan takes threads that queries want."""
        layer, analyze = _number(query, "layer", 0), query.get("analyze") == "true"
        if not self._explaining.acquire(blocking=False):
            raise CapacityError("another EXPLAIN of the console is under way; try again in a moment")
        try:
            if "session" in query:
                return api.explain_session(database, query["session"], layer, analyze)
            return api.explain(database, _text(query, "name"), layer, analyze)
        finally:
            self._explaining.release()


@cache
def static_files() -> Mapping[str, bytes]:
    """The files of the pages by their names."""
    return {file.name: file.read_bytes() for file in files("kvdb.server.console").joinpath("static").iterdir()}


def _contexts(database: AnyDatabase, query: Mapping[str, str]) -> api.Json:
    return api.contexts(database, query.get("prefix", ""), query.get("after", ""), _number(query, "limit", 50))


def _to_files(_request: Request) -> Reply:
    return Reply(status=HTTPStatus.PERMANENT_REDIRECT, headers=SAFE | {"Location": FILES})


def _file(request: Request) -> Reply:
    name = request.path.removeprefix(FILES) or "index.html"
    if name not in static_files():
        return Reply.text("there is no such page", HTTPStatus.NOT_FOUND, SAFE)
    return Reply(static_files()[name], TYPES[name.rpartition(".")[2]], headers=SAFE | {"Cache-Control": "no-cache"})


def _told(status: HTTPStatus, value: api.Json) -> Reply:
    """A value as JSON. A name may hold half a surrogate pair, which stays escaped."""
    headers = SAFE | {"Cache-Control": "no-store"}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="kvdb"'
    return Reply(json.dumps(_finite(value), allow_nan=False).encode(), JSON, status, headers)


def _finite(value: Any) -> Any:
    """The value with None for each number that JSON has no way to write."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _text(query: Mapping[str, str], name: str) -> str:
    if name not in query:
        raise InvalidArgument(f"the request has no {name}")
    return query[name]


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    value = query.get(name, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) <= DIGITS_MAX):
        raise InvalidArgument(f"{name} is {value[:SHOWN_MAX]!r}; expected a number")
    return int(value)
