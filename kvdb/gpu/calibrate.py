"""What a GPU does in a second, measured: the numbers that turn costs of parts on the card into time.

As on the CPU, each is the lower quartile of a few samples. The host waits at the end of each, as a query does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from kvdb.gpu.device import Device
from query_optimizer.cost import GpuMachine

SAMPLES = 9
ROW = 128
"""Elements of a token's key of one head."""
STEP_LAUNCHES = 6
"""Of a search: two passes over codes, selection, and attention over what was selected, beside the query's way in and out."""
LEAST = 1e-7
"""Seconds: what was measured as less is noise."""


@dataclass(frozen=True)
class _Sizes:
    """nbytes: of what is read and copied, more than caches hold. side: of the matrices that are multiplied."""

    nbytes: int
    side: int


CARD, CPU = _Sizes(1 << 29, 4096), _Sizes(1 << 20, 64)
"""On the CPU under the interpreter the numbers mean nothing, and are to come soon."""


def calibrate(device: Device) -> GpuMachine:
    """Measure. Takes three times 512 MiB of the card, and half that of pinned memory, for the time of the call; under a second.
    Raises CapacityError or GpuLost."""
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
        stream = 2 * rows.nbytes / max(self._seconds(lambda: copy.copy_(rows)) - call_s, LEAST)
        return GpuMachine(
            stream_bytes_s=stream,
            gather_bytes_s=min(self._gather(rows, call_s), stream),
            operations_s=self._operations(call_s),
            host_bytes_s=self._host(copy, call_s),
            call_s=call_s,
            step_s=max(step_s, call_s),
        )

    def _gather(self, rows: torch.Tensor, call_s: float) -> float:
        """Bytes a second, of rows drawn from everywhere; what is read is written too."""
        ids = torch.randperm(len(rows), device=rows.device)[: len(rows) // 2]
        found = torch.empty((len(ids), ROW), dtype=rows.dtype, device=rows.device)
        spent = self._seconds(lambda: torch.index_select(rows, 0, ids, out=found))
        return 2 * found.nbytes / max(spent - call_s, LEAST)

    def _operations(self, call_s: float) -> float:
        side = self._sizes.side
        left = torch.randn((side, side), device=self._device.torch).to(torch.bfloat16)
        product = torch.empty_like(left)
        return float(side**3) / max(self._seconds(lambda: torch.matmul(left, left, out=product)) - call_s, LEAST)

    def _host(self, target: torch.Tensor, call_s: float) -> float:
        """Bytes a second to the card, of a buffer that copies come through."""
        bytes_of = target.view(-1).view(torch.uint8)[: self._sizes.nbytes // 2]
        with self._device.staging.take(bytes_of.nbytes) as buffer:
            spent = self._seconds(lambda: bytes_of.copy_(buffer.tensor, non_blocking=True))
        return bytes_of.nbytes / max(spent - call_s, LEAST)

    def _seconds(self, run: Callable[[], object]) -> float:
        """From a call's launch until the host knows that it is done; a first one warms up."""
        samples: list[float] = []
        for _ in range(SAMPLES + 1):
            begin = perf_counter()
            run()
            self._device.wait()
            samples.append(perf_counter() - begin)
        return max(sorted(samples[1:])[SAMPLES // 4], LEAST)
