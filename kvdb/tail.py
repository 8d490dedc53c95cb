"""A session's own tokens of one layer, of which those that have become old are indexed."""

import indexes.registry as registry
from indexes.base import Index
from kvdb.config import Config
from kvdb.gpu.side import TailSlots
from kvdb.storage.table import BlockTable

NAME = "tail"
KIND = "flat"
"""Adding to this kind of index costs what the new keys cost."""


class Tail:
    """The table of a growing tail and, once it is long, an index over its older tokens."""

    def __init__(self, config: Config, table: BlockTable) -> None:
        self.table = table
        self.index: Index | None = None
        self.sealed = 0
        """Tokens that are indexed."""
        self.seals = 0
        """How often some were."""
        self.copy: TailSlots | None = None
        """On the GPU, once a plan wanted one."""
        size = table.layout.block_size
        self._step = -(-config.indexes.tail_tokens // size) * size
        self._recent = config.window.recent_tokens

    def release(self) -> None:
        """Give the copy back."""
        if self.copy is not None:
            self.copy.release()
            self.copy = None

    def seal(self) -> None:
        """Index what has become old, if it is much."""
        old = self.table.length - self._recent - self.sealed
        if not self._step or old < self._step:
            return
        self.sealed += old // self._step * self._step
        blocks = self.table.keys(self.sealed)
        if self.index is None:
            self.index = registry.build(KIND, blocks)
        else:
            self.index.add(blocks)
        self.seals += 1
