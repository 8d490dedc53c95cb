"""A decode step of several sessions on the GPU, whose queries come from main memory, and whose answers go there."""

from collections.abc import Sequence

import torch

from kvdb.attention.device import Answer
from kvdb.attention.triton.pages import Pages
from kvdb.gpu.device import Device
from kvdb.gpu.graph import CapturedStep
from kvdb.gpu.launch import launching
from kvdb.gpu.request import AttentionRequest
from kvdb.gpu.scratch import Scratch
from kvdb.gpu.step_launches import StepLaunches
from kvdb.types import Array, ModelSpec


class DecodeStep:
    """One decode step of some sessions of one model, made once and used for one token after the other."""

    def __init__(
        self, device: Device, scratch: Scratch, pages: Pages, spec: ModelSpec, requests: Sequence[AttentionRequest]
    ) -> None:
        """Raises CapacityError or GpuLost."""
        self._device = device
        self._requests = requests
        with launching(device, device.query_stream):
            self._launches = StepLaunches(device, scratch, pages, spec, requests)
        self._step = CapturedStep(self._launches.launch, device.query_stream)

    def launch(self, q: Array) -> None:
        """Launch the attention of q `[sessions, q_heads, head_dim]`, the last token of each. Raises CapacityError or GpuLost."""
        device = self._device
        for request in self._requests:
            if request.tail is not None:
                request.tail.sync()
        with launching(device, device.query_stream):
            if self._launches.follow_tails():
                self._step.reset()
            with device.query_staging.take(q.nbytes) as buffer:
                buffer.array.view(q.dtype).reshape(q.shape)[:] = q
                self._launches.q.view(torch.uint8).view(-1).copy_(buffer.tensor, non_blocking=True)
                buffer.sent(device.query_stream)
            self._step()
            self._launches.outputs.send([request.tail_tokens for request in self._requests])

    def wait(self) -> list[Answer]:
        """The answer of each session, once it is there. To be called once after each `launch`. Raises CapacityError or
        GpuLost."""
        return self._launches.outputs.wait()
