"""The tiers of one database, one pool for each size of block."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from kvdb.config import StorageConfig
from kvdb.storage.block import BlockLayout
from kvdb.storage.cpu import CpuBudget, CpuTier
from kvdb.storage.folder import SegmentFolder
from kvdb.storage.loader import Loader
from kvdb.storage.segment_file import SegmentFile
from kvdb.storage.slabs import Slabs
from kvdb.storage.slot import SlotLayout
from kvdb.storage.table import BlockTable
from kvdb.storage.tier import Blocks
from kvdb.types import ModelSpec, TierStats

if TYPE_CHECKING:
    from kvdb.storage.gpu import GpuTier, Memory


class BlockStore:
    """Gives out block tables; specs whose blocks are of one size share a pool. Thread-safe.

    disk: where segments lie that were offloaded, None without a folder for them; loader: what brings them back. slabs: copies of
    blocks on the GPU, None without one.
    """

    def __init__(self, config: StorageConfig, gpu: "Memory | None" = None) -> None:
        """gpu: the device that `kvdb.gpu.opening.open_gpu` opened, which this closes. Raises Unavailable for a folder that cannot
        be used."""
        self._config = config
        self.disk = SegmentFolder(Path(config.disk_path), config.disk_bytes_max) if config.disk_path else None
        self.loader = Loader()
        self.slabs = None if gpu is None else Slabs(config, gpu)
        self._budget = CpuBudget(config.cpu_bytes_max)
        self._tiers: dict[int, CpuTier] = {}
        self._lock = Lock()

    def tables(self, spec: ModelSpec) -> list[BlockTable]:
        """An empty table for each layer. Takes no blocks."""
        layout = BlockLayout.of(spec, self._config.block_size)
        with self._lock:
            tier = self._tiers.setdefault(layout.nbytes, CpuTier(layout.nbytes, self._config.arena_bytes, self._budget))
        return [BlockTable(tier, layout) for _ in range(spec.layers)]

    def gpu_tier(self, spec: ModelSpec) -> "GpuTier | None":
        """For copies of a model's blocks; None where there is no GPU, or none that takes them. Opened when first asked for."""
        return None if self.slabs is None else self.slabs.tier(BlockLayout.of(spec, self._config.block_size))

    def stats(self) -> list[TierStats]:
        on_gpu = [] if self.slabs is None else self.slabs.stats()
        on_disk = [] if self.disk is None else self.disk.stats()
        return on_gpu + [tier.stats() for tier in self._tiers.values()] + on_disk

    def check_integrity(
        self,
        tables: Sequence[BlockTable],
        files: Sequence[SegmentFile],
        slots: Mapping[SlotLayout, Sequence[Blocks]] | None = None,
    ) -> None:
        """Raises IntegrityError unless `tables` are exactly the owners of all used blocks, `files` all that are on disk, and
        `slots` those of every owner on the GPU, by their layout."""
        for tier in self._tiers.values():
            tier.check_integrity([table.blocks for table in tables if table.tier is tier])
        if self.slabs is not None:
            self.slabs.check_integrity(slots)
        if self.disk is not None:
            self.disk.check_integrity(files)

    def close(self) -> None:
        self.loader.close()
        if self.slabs is not None:
            self.slabs.close()
        if self.disk is not None:
            self.disk.close()
        for tier in self._tiers.values():
            tier.close()
