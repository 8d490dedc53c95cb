"""What becomes of segments that nobody uses."""

import time
from typing import Self

from kvdb.config import StorageConfig

LOOKS = 8
"""How often contexts are looked through while one becomes cold."""


class Cold:
    """The format of segments that no context over them has used for so many seconds, "" where they stay as they are. Not
    thread-safe."""

    def __init__(self, format: str, after_seconds: float) -> None:  # noqa: A002  # the field's name
        self.format = format
        self._after_seconds = after_seconds
        self._looked = time.monotonic()

    @classmethod
    def of(cls, storage: StorageConfig) -> Self:
        return cls(storage.format_cold, storage.cold_after_seconds)

    def before(self) -> float:
        """Since when a context is cold that was last used then, in seconds since the epoch."""
        return time.time() - self._after_seconds

    def is_due(self) -> bool:
        """Whether it is time to look for what became cold. Whoever is told so looks."""
        now = time.monotonic()
        if not self.format or now - self._looked < self._after_seconds / LOOKS:
            return False
        self._looked = now
        return True
