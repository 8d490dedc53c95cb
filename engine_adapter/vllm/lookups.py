"""Looking prompts up without ever holding vLLM's scheduler for long."""

from engine_adapter.contexts import ModelContexts
from engine_adapter.vllm.log import LOG
from engine_adapter.vllm.presence import Presence
from kvdb.errors import KvdbError
from kvdb.types import Tokens


class Lookups:
    """The lookups of a scheduler. One that fails is a miss."""

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
