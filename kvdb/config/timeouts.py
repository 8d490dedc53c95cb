"""How long a client waits for a server."""

from dataclasses import dataclass, fields

from kvdb.config.checks import check_types
from kvdb.errors import ConfigError


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a call on a server may take where nothing else is said.

    lookup: what is asked about contexts, sessions, plans and the server. attend: what a session does, from its creation to its
    end. progress: a stream of keys and values, in or out, from one piece to the next. store: what makes, moves or forgets
    contexts, such as the commit of an import. maintain: what reads a whole store or builds an index.
    """

    lookup: float = 10.0
    attend: float = 30.0
    progress: float = 30.0
    store: float = 300.0
    maintain: float = 3600.0

    def __post_init__(self) -> None:
        check_types(self, "timeouts")
        for setting in fields(self):
            seconds = getattr(self, setting.name)
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"timeouts.{setting.name} is {seconds}; expected a number of seconds above 0")

    @classmethod
    def of(cls, given: "float | Timeouts | None") -> "Timeouts":
        """The table for what a caller says: one number for every call, a table, or None for the defaults. Raises ConfigError."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise ConfigError(f"timeout is {given!r}; expected a number of seconds, or kvdb.Timeouts")
        return cls(*[float(given)] * len(fields(cls)))
