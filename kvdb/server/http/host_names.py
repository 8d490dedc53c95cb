"""Under which names a port without a token answers, so that a page from elsewhere cannot read it through a name of its own.

A browser lets a page read what its own host name answers, and whoever owns a name may let it lead to 127.0.0.1 once the page is
loaded (DNS rebinding). The Host header then says that name. An address cannot be led elsewhere, nor can localhost.
"""

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit


class HostNames:
    """The names of a port: those given, every address, and localhost."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {"localhost", *(name.lower() for name in names)}

    def know(self, header: str) -> bool:
        """Whether the value of a Host header, "" for none, is one of them, with or without a port."""
        try:
            name = urlsplit(f"//{header}").hostname
            _ = urlsplit(f"//{header}").port
        except ValueError:
            return False
        return name is not None and (name.rstrip(".") in self._names or _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
