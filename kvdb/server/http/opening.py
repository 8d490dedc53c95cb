"""Opens the HTTP port of a server, if it is to have one."""

import hmac
from collections.abc import Callable, Sequence

from kvdb.config import Config
from kvdb.errors import ConfigError
from kvdb.server.http.answering import Allows, Pages
from kvdb.server.http.health import health_routes
from kvdb.server.http.port import HttpPort
from kvdb.server.http.routes import Route, Routes


def open_http(config: Config, ready: Callable[[], bool], routes: Sequence[Route], *, exposed: bool) -> HttpPort | None:
    """The port of the configuration, not yet started; None where it names none.

    ready: whether the server takes calls. routes: beside those of its health. exposed: whether other machines may reach
    `metrics.host`. Raises ConfigError for a port that cannot be taken, and for one that others may reach and that asks for no
    token.
    """
    metrics, token = config.metrics, config.server.token
    if metrics.port is None:
        return None
    if exposed and not token:
        raise ConfigError(
            f"metrics.host is {metrics.host}, which other machines may reach, and the server asks for no token; set "
            "server.token, or KVDB_TOKEN, or let metrics.host be 127.0.0.1"
        )
    return HttpPort(metrics.host, metrics.port, Pages(Routes([*health_routes(ready), *routes]), allows(token)))


def allows(token: str) -> Allows:
    """Who may ask where the server has that token: everybody where it is ""."""
    expected = f"Bearer {token}".encode()
    return lambda given: not token or hmac.compare_digest(given.encode(), expected)
