"""A session's own tokens of one layer. Once there are many, the older ones are sealed into an index."""

import indexes.registry as registry
from indexes.base import Index
from kvdb.attention.device import TailSlots
from kvdb.catalog.evidence.evidence import Evidence
from kvdb.config import Config
from kvdb.storage.block_table import BlockTable

NAME = "tail"
KIND = "flat"
"""The kind of index over sealed tokens: inserting new keys into it costs no more than the new keys."""


class Tail:
    """The block table of a growing tail and, once it is long, an index over its sealed tokens [0, sealed).

    seals: how often tokens were sealed. evidence: the measured errors of answers over them. copy: the tail's slots on the GPU,
    None until a plan wants them there.
    """

    def __init__(self, config: Config, table: BlockTable) -> None:
        self.table = table
        self.index: Index | None = None
        self.sealed = self.seals = 0
        self.copy: TailSlots | None = None
        self.evidence = Evidence()
        size = table.layout.block_size
        self._step = -(-config.indexes.tail_tokens // size) * size
        self._recent = config.window.recent_tokens

    def release(self) -> None:
        """Give the slots on the GPU back."""
        if self.copy is not None:
            self.copy.release()
            self.copy = None

    def truncated(self) -> None:
        """Forget the codes and copies of tokens that were taken from the end of the table."""
        if self.sealed > self.table.length:
            self.index, self.sealed = None, 0
            self.seals += 1
        if self.copy is not None:
            self.copy.truncated()

    @property
    def until_seal(self) -> int:
        """How many more tokens may come before `seal` would index any."""
        return self._step - 1 - (self.table.length - self._recent - self.sealed) if self._step else 1 << 62

    def seal(self) -> None:
        """Index the tokens before the recent window, in steps of config.indexes.tail_tokens."""
        unsealed = self.table.length - self._recent - self.sealed
        if not self._step or unsealed < self._step:
            return
        self.sealed += unsealed // self._step * self._step
        blocks = self.table.keys(self.sealed)
        if self.index is None:
            self.index = registry.build(KIND, blocks)
        else:
            self.index.insert(blocks)
        self.seals += 1
