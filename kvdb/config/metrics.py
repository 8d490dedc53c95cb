"""The settings of the HTTP port, for those who watch a server."""

from dataclasses import dataclass

from kvdb.config.checks import check_types
from kvdb.errors import ConfigError


@dataclass(frozen=True)
class MetricsConfig:
    """The HTTP port of `kvdb serve`, with its health, its metrics and its console. Nothing can be changed through it.

    host: an address. port: None for no HTTP, 0 picks a free one. Other machines may reach it only where the server asks for a
    token, which this port asks for too, but for the two answers about health. host_names: under which
    names it may be asked where there is no token, beside addresses, localhost and `host`.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    host_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "metrics")
        if self.port is not None and not 0 <= self.port <= 65535:
            raise ConfigError(f"metrics.port is {self.port}; expected 0 to 65535")
