"""Uses of stored contexts that their catalogue's file does not know of yet."""

import time
from collections.abc import Iterable

FLUSH_SECONDS = 60.0
"""How long a use of a context may go unwritten; a crash loses those of about that time."""


class UnwrittenUses:
    """The names of contexts that were used since their uses were last written. Not thread-safe but for `note`."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._flush_at = time.monotonic() + FLUSH_SECONDS

    @property
    def due(self) -> bool:
        """Whether there are some that have waited long enough."""
        return bool(self._names) and time.monotonic() > self._flush_at

    def note(self, names: Iterable[str]) -> None:
        self._names.update(names)

    def take(self) -> set[str]:
        """The names, which count as written from now on."""
        self._flush_at = time.monotonic() + FLUSH_SECONDS
        names, self._names = self._names, set()
        return names
