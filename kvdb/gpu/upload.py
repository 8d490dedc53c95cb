"""Copying blocks of main memory into slots."""

import numpy as np
import torch

from kvdb.attention.triton.blocks import store
from kvdb.attention.triton.coarse import bounds
from kvdb.attention.triton.flat import encode
from kvdb.attention.triton.pages import TORCH, Pages
from kvdb.gpu.device import Device
from kvdb.gpu.launch import launching
from kvdb.gpu.mirror import Mirror
from kvdb.gpu.streams import DeviceStream
from kvdb.storage.block_table import BlockTable
from kvdb.storage.gpu import GpuTier

PIECE_BYTES = 8 << 20
"""Bytes of keys and values that are copied at a time: enough for the bus, little enough to be staged."""


class Uploader:
    """Copies the blocks of mirrors, and writes the index pages over their keys, on the copy stream."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __call__(self, tier: GpuTier, mirror: Mirror) -> None:
        """Fill the slots of a mirror, and wait until they are filled. Raises CapacityError, GpuLost, IntegrityError or
        Unavailable."""
        device, segment = self._device, mirror.segment
        pages = Pages(tier.slab, tier.layout)
        for number, table in enumerate(segment.tables):
            with segment.holding(number):
                self._upload_layer(pages, table, mirror.first_token, mirror.slots[number])
        with device.watch():
            device.copy_stream.synchronize()

    def _upload_layer(
        self, pages: Pages, table: BlockTable, begin: int, slots: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    ) -> None:
        layout = table.layout
        step = max(1, PIECE_BYTES // layout.nbytes)
        for at in range(0, len(slots), step):
            piece = slots[at : at + step]
            first = begin + at * layout.block_size
            n = min(len(piece) * layout.block_size, table.length - first)
            with launching(self._device, self._device.copy_stream):
                targets = torch.from_numpy(piece.astype(np.int32)).to(self._device.torch)
                upload_tokens(self._device, self._device.copy_stream, pages, (table, first, n), targets, 0)
                counts = np.full(len(piece), layout.block_size, np.int32)
                counts[-1] = n - (len(piece) - 1) * layout.block_size
                filled = torch.from_numpy(counts).to(self._device.torch)
                encode(pages, targets, filled)
                bounds(pages, targets, filled)


def upload_tokens(
    device: Device, stream: DeviceStream, pages: Pages, source: tuple[BlockTable, int, int], slots: torch.Tensor, at: int
) -> None:
    """Launch the copy of tokens of a block table to tokens [at, at + n) of a run of slots.

    source: the table, the first token to copy, and n. slots: int32 on the device. Must be called inside `launching`, with the
    same stream.
    """
    table, first, n = source
    layout = table.layout
    staging = device.query_staging if stream is device.query_stream else device.staging
    with staging.take(n * layout.in_format("").token_nbytes) as buffer:
        shape = 2, layout.kv_heads, n, layout.head_dim
        staged = buffer.array.view(layout.numpy_dtype).reshape(shape)
        layout.read_into(table.addresses, first, staged[0], staged[1])
        k, v = buffer.tensor.to(device.torch, non_blocking=True).view(TORCH[layout.dtype]).view(shape)
        store(pages, slots, at, k, v)
        buffer.sent(stream)
