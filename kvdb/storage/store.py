"""The tiers of one database, one pool for each size of block."""

from collections.abc import Sequence
from threading import Lock

from kvdb.config import StorageConfig
from kvdb.storage.block import BlockLayout
from kvdb.storage.cpu import CpuBudget, CpuTier
from kvdb.storage.table import BlockTable
from kvdb.storage.tier import TierStats
from kvdb.types import ModelSpec


class BlockStore:
    """Gives out block tables; specs whose blocks are of one size share a pool. Thread-safe."""

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._budget = CpuBudget(config.cpu_bytes_max)
        self._tiers: dict[int, CpuTier] = {}
        self._lock = Lock()

    def tables(self, spec: ModelSpec) -> list[BlockTable]:
        """An empty table for each layer. Takes no blocks."""
        layout = BlockLayout.of(spec, self._config.block_size)
        with self._lock:
            tier = self._tiers.setdefault(layout.nbytes, CpuTier(layout.nbytes, self._config.arena_bytes, self._budget))
        return [BlockTable(tier, layout) for _ in range(spec.layers)]

    def stats(self) -> list[TierStats]:
        return [tier.stats() for tier in self._tiers.values()]

    def check_integrity(self, tables: Sequence[BlockTable]) -> None:
        """Raises IntegrityError unless `tables` are exactly the owners of all used blocks."""
        for tier in self._tiers.values():
            tier.check_integrity([table.blocks for table in tables if table.tier is tier])

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.close()
