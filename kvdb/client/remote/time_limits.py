"""How long each call on a server may take."""

import kvdb.deadlines as deadlines
from kvdb.config import Timeouts


class TimeLimits:
    """The seconds for each call: what the caller says in a `with`, or with `timeout=`, and otherwise what `Timeouts` has."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts

    def group(self, name: str) -> float:
        """The seconds for a call of a group, a field of `Timeouts`. Raises DeadlineExceeded where the caller's time is over."""
        said = deadlines.remaining()
        seconds: float = getattr(self._timeouts, name) if said is None else said
        return seconds
