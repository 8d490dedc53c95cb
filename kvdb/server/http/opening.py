"""Opens the HTTP port of a server, if it is to have one."""

import hmac
from collections.abc import Callable, Sequence
from ssl import SSLContext

from kvdb.config import Config
from kvdb.server.http.answering import Allows, Pages
from kvdb.server.http.health import health_routes
from kvdb.server.http.host_names import HostNames
from kvdb.server.http.port import HttpPort
from kvdb.server.http.routes import Route, Routes


def open_http(
    config: Config, ready: Callable[[], bool], routes: Sequence[Route], tls: SSLContext | None = None
) -> HttpPort | None:
    """The port of the configuration, not yet started; None where it names none.

    ready: whether the server takes calls. routes: beside those of its health. tls: what it answers TLS with.
    Raises ConfigError for a port that cannot be taken.
    """
    metrics, token = config.metrics, config.server.token
    if metrics.port is None:
        return None
    names = None if token else HostNames([metrics.host, *metrics.host_names])
    return HttpPort(metrics.host, metrics.port, Pages(Routes([*health_routes(ready), *routes]), allows(token), names), tls)


def allows(token: str) -> Allows:
    """Who may ask where the server has that token: everybody where it is ""."""
    expected = f"Bearer {token}".encode()
    return lambda given: not token or hmac.compare_digest(given.encode(), expected)
