"""The settings of the log of `kvdb serve`."""

from dataclasses import dataclass

from kvdb.config.checks import check_types
from kvdb.errors import ConfigError

FORMATS = ("human", "json")
LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class LogConfig:
    """What `kvdb serve` writes to stderr, a line for each thing that happens.

    format: human or json. level: the least that is written: debug, info, warning or error.
    """

    format: str = "human"
    level: str = "info"

    def __post_init__(self) -> None:
        check_types(self, "log")
        for name, known in (("format", FORMATS), ("level", LEVELS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"log.{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
