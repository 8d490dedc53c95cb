"""A copy of a session's tail of one layer on the GPU."""

import numpy as np
import torch

from kvdb.attention.triton.pages import Pages
from kvdb.errors import CapacityError
from kvdb.gpu.device import Device
from kvdb.gpu.launch import launching
from kvdb.gpu.mirror import Mirrors
from kvdb.gpu.upload import upload_tokens
from kvdb.storage.block_table import BlockTable
from kvdb.storage.gpu import GpuTier
from kvdb.storage.slot import SlotLayout
from kvdb.storage.tier import Blocks

STEP_BLOCKS = 4
"""Slots that are taken at a time, so that the table on the device changes seldom."""


class TailMirror:
    """A copy of a growing block table, brought up to date before each query.

    slots: int64 `[blocks]`, of the tier; more than the tokens need. tokens: how many lie there; steps on the device append some
    that the table does not have yet (`kvdb.gpu.resident`). full: whether there was no room, so that the CPU reads the tail. A
    fork begins with an empty copy: its tokens are copied anew, from main memory.
    """

    def __init__(self, device: Device, mirrors: Mirrors, tier: GpuTier, table: BlockTable) -> None:
        self.slots: Blocks = np.zeros(0, np.int64)
        self.tokens = 0
        self.full = False
        self._device = device
        self._mirrors = mirrors
        self._tier = tier
        self._table = table
        self._on_device: tuple[Blocks, torch.Tensor] | None = None

    @property
    def length(self) -> int:
        """Tokens of the tail, all of which are copied after `sync`."""
        return self._table.length

    @property
    def layout(self) -> SlotLayout:
        """The layout of its slots."""
        return self._tier.layout

    def sync(self) -> None:
        """Launch the copy of the tokens that were appended since, on the query stream. Raises CapacityError or GpuLost."""
        length = self._table.length
        try:
            self.reserve(length)
        except CapacityError:
            self.release()
            self.full = True
            raise
        if length == self.tokens:
            return
        device = self._device
        with launching(device, device.query_stream):
            source = self._table, self.tokens, length - self.tokens
            pages = Pages(self._tier.slab, self._tier.layout)
            upload_tokens(device, device.query_stream, pages, source, self.device_slots(), self.tokens)
        self.tokens = length

    def reserve(self, tokens: int) -> None:
        """Take slots for so many tokens in all. Raises CapacityError, and then takes none, or GpuLost."""
        more = self._table.layout.blocks_for(tokens) - len(self.slots)
        if more > 0:
            more_slots = self._mirrors.allocate_tail(self._tier, max(more, min(STEP_BLOCKS, self._tier.free)))
            self.slots = np.concatenate([self.slots, more_slots])

    def device_slots(self) -> torch.Tensor:
        """The slots on the device, int32. Must be called inside `launching`."""
        if self._on_device is None or self._on_device[0] is not self.slots:
            table = torch.from_numpy(self.slots.astype(np.int32)).to(self._device.torch, non_blocking=True)
            self._on_device = self.slots, self._device.tracked(table)
        return self._on_device[1]

    def truncated(self) -> None:
        """Tokens were taken from the end of the table: copy anew what follows those that are left."""
        self.tokens = min(self.tokens, self._table.length)

    def release(self) -> None:
        """Give the slots back. The next `sync` copies everything again."""
        self._tier.release(self.slots)
        self.slots, self.tokens = np.zeros(0, np.int64), 0
