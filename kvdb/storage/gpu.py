"""The GPU tier: copies of blocks in the memory of a GPU."""

from contextlib import ExitStack
from typing import Protocol

import numpy as np
import torch

from kvdb.errors import CapacityError
from kvdb.storage.slot import SlotLayout
from kvdb.storage.slots import CountedTier
from kvdb.storage.tier import Blocks
from kvdb.types import Addresses, TierStats


class DeviceMemory(Protocol):
    """The part of a GPU device that a tier uses; `kvdb.gpu.device.Device` is one."""

    name: str
    lost: bool

    @property
    def tracked_nbytes(self) -> int: ...

    @property
    def pinned_nbytes(self) -> int: ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def copies_after_queries(self) -> None: ...

    def overwrite(self, slab: torch.Tensor, rows: Blocks) -> None: ...

    def close(self) -> None: ...


class GpuTier(CountedTier):
    """A `Tier` over one slab, whose blocks are slots of one layout. Thread-safe. It never grows: eviction makes room.

    slab: uint8 `[slots, layout.nbytes]` on the device, zero at first, so that no slot ever holds NaN or infinity. Slots hold
    copies only, so that nothing is lost with the device but the last tokens of steps that stay there (`kvdb.gpu.resident`).
    """

    name = "gpu"

    def __init__(self, layout: SlotLayout, slots: int, memory: DeviceMemory, *, overwrites: bool = False) -> None:
        """overwrites: whether slots are zeros when they are allocated, whatever stood there. Raises CapacityError where the
        device has no memory for so many slots, and GpuLost."""
        super().__init__()
        self.layout = layout
        self.block_nbytes = layout.nbytes
        self.memory = memory
        self._overwrites = overwrites
        self.slab = memory.zeros((slots, layout.nbytes), torch.uint8)
        self._slots.add(slots)

    @property
    def slots(self) -> int:
        return self._slots.total

    @property
    def free(self) -> int:
        """Free slots. Others may take them at any time."""
        return self._slots.free

    def allocate(self, count: int, *, evict: bool = False) -> Blocks:  # noqa: ARG002
        """Take slots for copies. The copy stream waits for queries that may still read their old contents. Raises CapacityError
        or GpuLost, and then takes none."""
        with self._lock:
            if self._slots.free < count:
                raise CapacityError(
                    f"the GPU tier has {self._slots.free} of its {self._slots.total} slots free and {count} were asked for; "
                    "let go of some, or raise storage.gpu_bytes_max"
                )
            blocks = self._take(count)
        with ExitStack() as undo:
            undo.callback(self.release, blocks)
            if self._overwrites:
                self.memory.overwrite(self.slab, blocks)
            self.memory.copies_after_queries()
            undo.pop_all()
        return blocks

    def release(self, blocks: Blocks) -> None:
        """Give slots back. Queries that were launched already may still read them (see `allocate`); later ones must not."""
        super().release(blocks)

    def addresses(self, blocks: Blocks) -> Addresses:
        """The device addresses of these slots, uint64."""
        return np.uint64(self.slab.data_ptr()) + blocks.astype(np.uint64) * np.uint64(self.block_nbytes)

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                name=self.name,
                blocks_used=self._slots.used,
                blocks_total=self._slots.total,
                block_nbytes=self.block_nbytes,
                nbytes=self.slab.untyped_storage().nbytes(),
                huge=False,
            )

    def close(self) -> None:
        """Free the slab, once no view of it is left."""
        self.slab = self.slab.new_empty((0, self.block_nbytes))
