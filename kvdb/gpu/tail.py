"""A session's own tokens of one layer on the GPU."""

import numpy as np
import torch

from kvdb.attention.triton.pages import Pages
from kvdb.errors import CapacityError
from kvdb.gpu.device import Device
from kvdb.gpu.filling import copy_in
from kvdb.gpu.mirror import Mirrors
from kvdb.gpu.work import at_work
from kvdb.storage.gpu import GpuTier
from kvdb.storage.slot import SlotLayout
from kvdb.storage.table import BlockTable
from kvdb.storage.tier import Blocks

STEP_BLOCKS = 4
"""Slots that are taken at a time, so that a table on the device changes once in a while only."""


class TailCopy:
    """Follows a growing table before each query. slots: int64, of the tier; more than the tokens need. tokens: that are there.
    full: whether there was no room, so that the CPU reads them.

    A fork begins with none of its own: its tokens are copied anew, from main memory.
    """

    def __init__(self, device: Device, mirrors: Mirrors, tier: GpuTier, table: BlockTable) -> None:
        self.slots: Blocks = np.zeros(0, np.int64)
        self.tokens = 0
        self.full = False
        self._device = device
        self._mirrors = mirrors
        self._tier = tier
        self._table = table
        self._on_device = torch.zeros(0, dtype=torch.int32)

    @property
    def length(self) -> int:
        """Tokens that `follow` will have brought there."""
        return self._table.length

    @property
    def layout(self) -> SlotLayout:
        """Of its slots."""
        return self._tier.layout

    def follow(self) -> None:
        """Launch the copy of what was appended since, on the query stream. Raises CapacityError or GpuLost."""
        layout, length = self._table.layout, self._table.length
        more = layout.blocks_for(length) - len(self.slots)
        if more > 0:
            try:
                fresh = self._mirrors.take(self._tier, max(more, min(STEP_BLOCKS, self._tier.free)))
            except CapacityError:
                self.release()
                self.full = True
                raise
            self.slots = np.concatenate([self.slots, fresh])
        if length == self.tokens:
            return
        device = self._device
        with at_work(device, device.query_stream):
            if len(self._on_device) != len(self.slots):
                self._on_device = device.tracked(torch.from_numpy(self.slots.astype(np.int32)).to(device.torch))
            source = self._table, self.tokens, length - self.tokens
            pages = Pages(self._tier.slab, self._tier.layout)
            copy_in(device, device.query_stream, pages, source, self._on_device, self.tokens)
        self.tokens = length

    def release(self) -> None:
        """Give the slots back; the next `follow` begins anew."""
        self._tier.release(self.slots)
        self.slots, self.tokens = np.zeros(0, np.int64), 0
