"""Measurements of a GPU's speed, which turn costs of parts on the card into time.

As on the CPU, each is the lower quartile of a few samples. The host waits at the end of each sample, as a query does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from kvdb.gpu.device import Device
from query_optimizer.cost import GpuMachine

SAMPLES = 9
ROW = 128
"""Elements of one key."""
STEP_LAUNCHES = 6
"""Launches of a search: two passes over codes, selection, attention over the selection, and the copies of query and result."""
SECONDS_MIN = 1e-7
"""Measured times below this are noise."""


@dataclass(frozen=True)
class _Sizes:
    """nbytes: bytes that are read and copied, more than caches hold. side: rows of the square matrices that are multiplied."""

    nbytes: int
    side: int


CARD, CPU = _Sizes(1 << 29, 4096), _Sizes(1 << 20, 64)
"""Sizes for a card, and for the interpreter, where the numbers mean nothing and should come soon."""


def calibrate(device: Device) -> GpuMachine:
    """Measure a device in under a second. Takes 1.5 GiB of the card and 256 MiB of pinned memory meanwhile. Raises CapacityError
    or GpuLost."""
    measuring = _Measuring(device, CPU if device.interpreted else CARD)
    with device.watch(), device.on(device.query_stream):
        return measuring.machine()


class _Measuring:
    def __init__(self, device: Device, sizes: _Sizes) -> None:
        self._device, self._sizes = device, sizes

    def machine(self) -> GpuMachine:
        where, sizes = self._device.torch, self._sizes
        little = torch.zeros(ROW, device=where)
        call_s = self._seconds(lambda: little.add_(1.0))
        step_s = self._seconds(lambda: [little.add_(1.0) for _ in range(STEP_LAUNCHES)])
        rows = torch.zeros((sizes.nbytes // (2 * ROW), ROW), dtype=torch.bfloat16, device=where)
        copy = torch.empty_like(rows)
        stream = 2 * rows.nbytes / max(self._seconds(lambda: copy.copy_(rows)) - call_s, SECONDS_MIN)
        return GpuMachine(
            stream_bytes_s=stream,
            gather_bytes_s=min(self._gather(rows, call_s), stream),
            operations_s=self._operations(call_s),
            host_bytes_s=self._host(copy, call_s),
            call_s=call_s,
            step_s=max(step_s, call_s),
        )

    def _gather(self, rows: torch.Tensor, call_s: float) -> float:
        """Bytes a second of gathering random rows, counting both reading and writing."""
        ids = torch.randperm(len(rows), device=rows.device)[: len(rows) // 2]
        gathered = torch.empty((len(ids), ROW), dtype=rows.dtype, device=rows.device)
        spent = self._seconds(lambda: torch.index_select(rows, 0, ids, out=gathered))
        return 2 * gathered.nbytes / max(spent - call_s, SECONDS_MIN)

    def _operations(self, call_s: float) -> float:
        side = self._sizes.side
        left = torch.randn((side, side), device=self._device.torch).to(torch.bfloat16)
        product = torch.empty_like(left)
        return float(side**3) / max(self._seconds(lambda: torch.matmul(left, left, out=product)) - call_s, SECONDS_MIN)

    def _host(self, target: torch.Tensor, call_s: float) -> float:
        """Bytes a second to the card, from a staging buffer."""
        bytes_of = target.view(-1).view(torch.uint8)[: self._sizes.nbytes // 2]
        with self._device.staging.take(bytes_of.nbytes) as buffer:
            spent = self._seconds(lambda: bytes_of.copy_(buffer.tensor, non_blocking=True))
        return bytes_of.nbytes / max(spent - call_s, SECONDS_MIN)

    def _seconds(self, run: Callable[[], object]) -> float:
        """Seconds from launching until the host knows that it is done. A first call warms up."""
        samples: list[float] = []
        for _ in range(SAMPLES + 1):
            begin = perf_counter()
            run()
            self._device.wait()
            samples.append(perf_counter() - begin)
        return max(sorted(samples[1:])[SAMPLES // 4], SECONDS_MIN)
