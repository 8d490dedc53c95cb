"""Whether the database is there, for all parts of a process that use it: its going is said once, and its coming back once."""

import time
from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import Literal

from engine_adapter.contexts import ModelContexts
from engine_adapter.vllm.log import LOG
from kvdb.errors import KvdbError, Unauthenticated, Unavailable
from kvdb.types import Tokens

Missed = Literal["looked up", "loaded", "saved", "answered"]
"""What a request goes without."""

PAUSE_SECONDS = 10.0
"""How long a database that is away is not asked again."""
AWAY = (Unavailable, Unauthenticated)
"""Errors that every request would have, whatever it asks for."""


class Presence:
    """Thread-safe. clock: seconds that only grow."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._away_since: float | None = None
        self._asks_again = float("-inf")
        self._missed: Counter[Missed] = Counter()
        self._untold: Counter[Missed] = Counter()

    def skips(self, what: Missed, requests: int = 1) -> bool:
        """Whether the database is left alone now, because it was away a moment ago; then the requests are counted."""
        with self._lock:
            if self._away_since is None or self._clock() >= self._asks_again:
                return False
            self._count(what, requests)
            return True

    def lost(self, error: object, what: Missed) -> bool:
        """Note that a request failed. Whether that is because the database is away, which is said here; where it is not, the
        caller says what the request goes without."""
        if not isinstance(error, AWAY):
            return False
        with self._lock:
            self._count(what, 1)
            self._asks_again = self._clock() + PAUSE_SECONDS
            if self._away_since is not None:
                return True
            self._away_since = self._clock()
        LOG.warning("kvdb steps aside until it is back, and is asked again every %.0f s: %s", PAUSE_SECONDS, error)
        return True

    def found(self) -> None:
        """Note that the database did what it was asked for."""
        with self._lock:
            if self._away_since is None:
                return
            seconds, self._away_since = self._clock() - self._away_since, None
            missed, self._missed = self._missed, Counter()
        told = ", ".join(f"{count} not {what}" for what, count in missed.items())
        LOG.info("kvdb is back: away for %.0f s; requests that went without it: %s", seconds, told)

    def take_missed(self) -> int:
        """How much was missed since the last call."""
        with self._lock:
            missed, self._untold = self._untold.total(), Counter()
        return missed

    def _count(self, what: Missed, requests: int) -> None:
        self._missed[what] += requests
        self._untold[what] += requests


class Lookups:
    """The lookups of a scheduler, which is never held for long: one that fails is a miss."""

    def __init__(self, contexts: ModelContexts | None, presence: Presence) -> None:
        self._contexts = contexts
        self._presence = presence

    def find(self, tokens: Tokens, salt: str) -> int:
        """How many leading tokens are stored; 0 where that cannot be told."""
        if self._contexts is None or self._presence.skips("looked up"):
            return 0
        try:
            found = self._contexts.find(tokens, salt)
        except KvdbError as error:
            if not self._presence.lost(error, "looked up"):
                LOG.warning("kvdb steps aside: a prompt of %d tokens is not looked up: %s", len(tokens), error)
            return 0
        self._presence.found()
        return found
