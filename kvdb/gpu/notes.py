"""What decode steps on the device note for the host, which reads it when it next waits."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvdb.attention.triton.finish import NEVER, SUMS
from kvdb.errors import CapacityError
from kvdb.gpu.device import Device
from kvdb.gpu.launch import launching, track_memory

ROWS = 8192
"""Layers of sessions that may take such steps at once; 20 bytes each."""


@dataclass(frozen=True)
class Noted:
    """What the steps since the last `reset` were, as `kvdb.attention.triton.finish` has it. first_bad: how many tokens the tail
    had with the first that is not finite. attended, missed, bound: sums over the steps. bound_max: the largest."""

    first_bad: int
    attended: float = 0.0
    missed: float = 0.0
    bound: float = 0.0
    bound_max: float = 0.0


class StepNotes:
    """A row for each layer of a session that takes steps on the device. Thread-safe.

    first_bad: int32 `[ROWS]`. sums: float32 `[ROWS, SUMS]`.
    """

    def __init__(self, device: Device) -> None:
        """Raises CapacityError or GpuLost."""
        self._device = device
        self._free = list(range(ROWS))  # without a lock, because rows are given back in the middle of anything
        with launching(device, device.query_stream):
            self.first_bad = torch.full((ROWS,), NEVER, dtype=torch.int32, device=device.torch)
            self.sums = torch.zeros((ROWS, SUMS), device=device.torch)
            track_memory(device, self)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `HoldsTensors`."""
        yield from (self.first_bad, self.sums)

    def take(self) -> int:
        """A row of one's own. Raises CapacityError where none is left."""
        try:
            return self._free.pop()
        except IndexError:
            raise CapacityError(f"{ROWS} layers of sessions take steps on the device already; others go by main memory") from None

    def give(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)

    def reset(self, row: int) -> None:
        """Forget what is in a row. Must be called inside `launching`."""
        self.first_bad[row].fill_(NEVER)
        self.sums[row].zero_()

    def read(self, row: int) -> Noted:
        """What is in a row, once the device is done. Must be called inside `launching`."""
        return Noted(int(self.first_bad[row]), *self.sums[row].tolist())
