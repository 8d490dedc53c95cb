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

    slots: int64 `[blocks]`, of the tier; more than the tokens need. tokens: how many are copied. full: whether there was no room,
    so that the CPU reads the tail. A fork begins with an empty copy: its tokens are copied anew, from main memory.
    """

    def __init__(self, device: Device, mirrors: Mirrors, tier: GpuTier, table: BlockTable) -> None:
        self.slots: Blocks = np.zeros(0, np.int64)
        self.tokens = 0
        self.full = False
        self._device = device
        self._mirrors = mirrors
        self._tier = tier
        self._table = table
        self._device_slots = torch.zeros(0, dtype=torch.int32)

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
        layout, length = self._table.layout, self._table.length
        more = layout.blocks_for(length) - len(self.slots)
        if more > 0:
            try:
                more_slots = self._mirrors.allocate_tail(self._tier, max(more, min(STEP_BLOCKS, self._tier.free)))
            except CapacityError:
                self.release()
                self.full = True
                raise
            self.slots = np.concatenate([self.slots, more_slots])
        if length == self.tokens:
            return
        device = self._device
        with launching(device, device.query_stream):
            if len(self._device_slots) != len(self.slots):
                table = torch.from_numpy(self.slots.astype(np.int32))
                self._device_slots = device.tracked(table.to(device.torch, non_blocking=True))
            source = self._table, self.tokens, length - self.tokens
            pages = Pages(self._tier.slab, self._tier.layout)
            upload_tokens(device, device.query_stream, pages, source, self._device_slots, self.tokens)
        self.tokens = length

    def truncated(self) -> None:
        """Tokens were taken from the end of the table: copy anew what follows those that are left."""
        self.tokens = min(self.tokens, self._table.length)

    def release(self) -> None:
        """Give the slots back. The next `sync` copies everything again."""
        self._tier.release(self.slots)
        self.slots, self.tokens = np.zeros(0, np.int64), 0
