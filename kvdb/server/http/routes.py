"""What is asked over HTTP, what is answered, and which function answers which path."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"


@dataclass(frozen=True)
class Request:
    """A GET or HEAD. path: decoded, without the query. query: the last value of each name. headers: by lower-case name."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, target: str, headers: Mapping[str, str]) -> "Request":
        """The request of a line like `/metrics?name=value`. Raises ValueError for what is no path."""
        parts = urlsplit(target)
        return cls(unquote(parts.path, errors="strict"), dict(parse_qsl(parts.query)), {k.lower(): v for k, v in headers.items()})


@dataclass(frozen=True)
class Reply:
    """An answer, whole. kind: its media type. headers: beside those that every answer has."""

    body: bytes = b""
    kind: str = TEXT
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def text(cls, said: str, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> "Reply":
        """One line of text."""
        return cls(f"{said}\n".encode(), TEXT, status, headers or {})

    @classmethod
    def json(cls, value: Any, status: HTTPStatus = HTTPStatus.OK) -> "Reply":
        """A value as JSON."""
        return cls(json.dumps(value).encode(), JSON, status)


Handler = Callable[[Request], Reply]


@dataclass(frozen=True)
class Route:
    """Which function answers a path. path: one that ends in / stands for all that begin with it. public: whether it is answered
    without the token of the server. probe: whether it is answered however many others are being answered."""

    path: str
    handler: Handler
    public: bool = False
    probe: bool = False


class Routes:
    """The routes of a port, of which the longest that fits a path answers it."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact = {route.path: route for route in routes}
        self._prefixes = sorted((route for route in routes if route.path.endswith("/")), key=lambda route: -len(route.path))

    def find(self, path: str) -> Route | None:
        """The route of a path, None where there is none."""
        found = self._exact.get(path)
        return found or next((route for route in self._prefixes if path.startswith(route.path)), None)
