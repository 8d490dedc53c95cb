"""Opens the HTTP port of a server, if it is to have one."""

from collections.abc import Callable, Sequence
from ssl import SSLContext

from kvdb.config import Config
from kvdb.errors import Unauthenticated
from kvdb.server.http.answering import Allows, Pages
from kvdb.server.http.health import health_routes
from kvdb.server.http.host_names import HostNames
from kvdb.server.http.port import HttpPort
from kvdb.server.http.routes import Route, Routes
from kvdb.server.tenancy.credentials import Credentials


def open_http(
    config: Config, ready: Callable[[], bool], routes: Sequence[Route], credentials: Credentials, tls: SSLContext | None = None
) -> HttpPort | None:
    """The port of the configuration, not yet started; None where it names none.

    ready: whether the server takes calls. routes: beside those of its health. credentials: whom it lets in.
    tls: what it answers TLS with.
    Raises ConfigError for a port that cannot be taken.
    """
    metrics = config.metrics
    if metrics.port is None:
        return None
    names = None if credentials.asks_for_token else HostNames([metrics.host, *metrics.host_names])
    return HttpPort(metrics.host, metrics.port, Pages(Routes([*health_routes(ready), *routes]), allows(credentials), names), tls)


def allows(credentials: Credentials) -> Allows:
    """Who may ask for what concerns all tenants: admins, and everybody where the server asks for no token."""

    def let_in(given: str) -> bool:
        try:
            return not credentials.asks_for_token or credentials.of_header(given).admin
        except Unauthenticated:
            return False

    return let_in
