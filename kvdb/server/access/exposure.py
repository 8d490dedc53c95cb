"""A port that other machines reach asks who comes, or is not opened."""

import socket
from ipaddress import ip_address

from kvdb.config import Config
from kvdb.errors import ConfigError


def is_exposed(host: str) -> bool:
    """Whether other machines may reach a server that listens on `host`, an address, a name or unix:/path."""
    if host.startswith("unix:"):
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"nobody can listen on {host!r} ({error.strerror})") from None
    return not all(ip_address(address[0]).is_loopback for *_, address in found)


def check_exposure(config: Config) -> str:
    """What an operator should know of the ports that the configuration opens, "" for nothing. Raises ConfigError for one that
    others may reach and that asks nobody who they are."""
    server, metrics = config.server, config.metrics
    asks = bool(server.token or server.tokens_file or server.tls_client_ca)
    if is_exposed(server.host) and not asks:
        raise ConfigError(
            f"server.host is {server.host}, which other machines may reach, and the server asks nobody who they are; set "
            "server.token, or KVDB_TOKEN, or server.tokens_file, or server.tls_client_ca, or let server.host be 127.0.0.1"
        )
    if metrics.port is not None and is_exposed(metrics.host) and not (server.token or server.tokens_file):
        raise ConfigError(
            f"metrics.host is {metrics.host}, which other machines may reach, and the server asks for no token; set "
            "server.token, or KVDB_TOKEN, or let metrics.host be 127.0.0.1"
        )
    if is_exposed(server.host) and not server.tls_cert:
        return f"the token and all that is sent to {server.host} can be read on the way; set server.tls_cert and server.tls_key"
    return ""
