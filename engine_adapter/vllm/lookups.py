"""Looking prompts up without ever holding vLLM's scheduler for long."""

import logging
import time
from collections.abc import Callable

from engine_adapter.contexts import ModelContexts
from kvdb.errors import KvdbError
from kvdb.types import Tokens

LOG = logging.getLogger("kvdb.vllm")

PAUSE_SECONDS = 10.0
"""How long a database that failed is not asked again."""


class Lookups:
    """The lookups of a scheduler. A database that fails is a miss, which the log says once, and is left alone for a while.

    clock: seconds that only grow.
    """

    def __init__(self, contexts: ModelContexts | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._contexts = contexts
        self._clock = clock
        self._asks_again = float("-inf")

    def find(self, tokens: Tokens, salt: str) -> int:
        """How many leading tokens are stored; 0 where that cannot be told."""
        if self._contexts is None or self._clock() < self._asks_again:
            return 0
        try:
            return self._contexts.find(tokens, salt)
        except KvdbError as error:
            self._asks_again = self._clock() + PAUSE_SECONDS
            LOG.warning("kvdb steps aside for %.0f s: %s", PAUSE_SECONDS, error)
            return 0
