"""Which addresses other machines may reach: a port there asks for a credential, or is not opened."""

import socket
from ipaddress import ip_address

from kvdb.config import ServerConfig
from kvdb.errors import ConfigError


def is_exposed(host: str) -> bool:
    """Whether other machines may reach a server that listens on `host`, an address, a name or unix:/path. Raises ConfigError for
    a name that leads nowhere."""
    if host.startswith("unix:"):
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"a port is to be opened on {host}, which is no address of this machine ({error.strerror})") from None
    return not all(ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def check_exposure(setting: str, host: str, config: ServerConfig) -> None:
    """Raises ConfigError where other machines may reach `host` and the server asks for no credential. setting: the name of the
    setting that holds the host."""
    if not config.guarded and is_exposed(host):
        raise ConfigError(
            f"{setting} is {host}, which other machines may reach, and the server asks for no credential, so that whoever "
            f"reaches it could read and drop everything; set server.token (or KVDB_TOKEN), or let {setting} be 127.0.0.1"
        )
