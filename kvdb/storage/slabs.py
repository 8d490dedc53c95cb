"""The GPU tiers of one database: a slab for each layout of slots, all under one budget."""

import logging
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from kvdb.config import StorageConfig
from kvdb.errors import CapacityError, GpuLost
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.slot import SlotLayout
from kvdb.storage.tier import Blocks
from kvdb.types import TierStats

if TYPE_CHECKING:
    from kvdb.storage.gpu import DeviceMemory, GpuTier

log = logging.getLogger(__name__)


class Slabs:
    """The GPU tiers, each opened when blocks of its layout are first copied. Thread-safe."""

    def __init__(self, config: StorageConfig, memory: "DeviceMemory") -> None:
        self._config = config
        self._memory = memory
        self._tiers: dict[SlotLayout, GpuTier | None] = {}
        self._lock = Lock()

    def tier(self, layout: BlockLayout) -> "GpuTier | None":
        """The tier for copies of blocks of that layout. None once the device is lost, and, with a warning that is logged once,
        where the device or the budget has no room for a slot."""
        if self._memory.lost:
            return None
        slot = SlotLayout.of(layout, self._config.gpu_format or None)
        with self._lock:
            if slot not in self._tiers:
                try:
                    self._tiers[slot] = self._open(slot)
                except (CapacityError, GpuLost) as error:
                    self._tiers[slot] = None
                    log.warning("blocks of %d KV heads of %d stay on the CPU: %s", slot.kv_heads, slot.head_dim, error)
            return self._tiers[slot]

    def stats(self) -> list[TierStats]:
        """An entry for each slab, and one named "gpu tables" for all other memory of the device and the main memory that is
        pinned for copies. Their nbytes add up to all device memory that this database uses."""
        with self._lock:
            slabs = [tier.stats() for tier in self._tiers.values() if tier is not None]
        beside = self._memory.tracked_nbytes - sum(slab.nbytes for slab in slabs)
        return [*slabs, TierStats("gpu tables", 0, 0, 0, beside, False, self._memory.pinned_nbytes)]

    @property
    def changes(self) -> int:
        """The number of times that references to slots were taken or released."""
        with self._lock:
            return sum(tier.changes for tier in self._tiers.values() if tier is not None)

    def check_integrity(self, owned: Mapping[SlotLayout, Sequence[Blocks]] | None = None) -> None:
        """owned: the slots of every owner by layout. Raises IntegrityError."""
        with self._lock:
            for layout, tier in self._tiers.items():
                if tier is not None:
                    tier.check_integrity(None if owned is None else owned.get(layout, []))

    def close(self) -> None:
        with self._lock:
            for tier in self._tiers.values():
                if tier is not None:
                    tier.close()
            self._tiers.clear()
        self._memory.close()

    def _open(self, layout: SlotLayout) -> "GpuTier":
        from kvdb.storage.gpu import GpuTier  # it imports torch, which only a GPU needs

        left = self._config.gpu_bytes_max - sum(t.stats().nbytes for t in self._tiers.values() if t is not None)
        nbytes = min(left, self._config.gpu_slab_bytes or left)
        slots = nbytes // layout.nbytes
        if not slots:
            raise CapacityError(
                f"a slot takes {layout.nbytes:,} bytes and {nbytes:,} are left of storage.gpu_bytes_max="
                f"{self._config.gpu_bytes_max:,}; raise it, or let each slab take less with storage.gpu_slab_bytes"
            )
        return GpuTier(layout, slots, self._memory, overwrites=self._config.overwrite_freed)
