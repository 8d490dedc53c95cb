"""One decode step of several sessions on the GPU: one launch for all exact attention, one chain of launches for each search."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from indexes.retrieval import Retrieval
from kvdb.attention.device import Answer
from kvdb.attention.triton.decode import decode
from kvdb.attention.triton.pages import TORCH, Pages
from kvdb.gpu.device import Device
from kvdb.gpu.graph import CapturedStep
from kvdb.gpu.interface import DevicePart
from kvdb.gpu.launch import launching, track_memory
from kvdb.gpu.outputs import StepOutputs
from kvdb.gpu.request import TAIL_GROWTH_BLOCKS, AttentionRequest, make_batch
from kvdb.gpu.scratch import Scratch
from kvdb.gpu.searching import SearchLaunch
from kvdb.types import Array, ModelSpec


class DecodeStep:
    """The tensors of one decode step of some sessions of one model, made once and used for one token after the other.

    Pieces that several sessions have in common are read once. A search starts from the largest q.k of what is read exactly.
    """

    def __init__(
        self, device: Device, scratch: Scratch, pages: Pages, spec: ModelSpec, requests: Sequence[AttentionRequest]
    ) -> None:
        """Raises CapacityError or GpuLost."""
        self._device = device
        self._scratch = scratch
        self._pages = pages
        self._spec = spec
        self._requests = requests
        self._step = CapturedStep(self._kernels, device.query_stream)
        self._tail_slots: list[int] | None = None
        self._batch_slots: list[int] = []
        with launching(device, device.query_stream):
            shape = len(requests), spec.q_heads
            self._q = torch.empty((*shape, spec.head_dim), dtype=TORCH[spec.dtype], device=device.torch)
            self._top = torch.full(shape, -torch.inf, device=device.torch)
            groups: defaultdict[tuple[str, Retrieval], list[tuple[int, DevicePart]]] = defaultdict(list)
            for session, request in enumerate(requests):
                for part in request.parts:
                    if part.kind is not None and part.retrieval is not None:
                        groups[part.kind, part.retrieval].append((session, part))
            exact = [request.exact_tokens for request in requests]
            self._outputs = StepOutputs(device, spec, pages.layout, exact, list(groups.values()))
            rope_shifts = [request.rope_shifts for request in requests]
            self._searches = [
                SearchLaunch(scratch, pages, spec, retrieval, group, rope_shifts) for (_, retrieval), group in groups.items()
            ]
            track_memory(device, self)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `HoldsTensors`. The batch is counted when it is made."""
        yield self._q
        yield self._top
        for search in self._searches:
            yield from search.tensors()

    def launch(self, q: Array) -> None:
        """Launch the attention of q `[sessions, q_heads, head_dim]`, the last token of each. Raises CapacityError or GpuLost."""
        device = self._device
        for request in self._requests:
            if request.tail is not None:
                request.tail.sync()
        with launching(device, device.query_stream):
            self._follow_tails()
            with device.query_staging.take(q.nbytes) as buffer:
                buffer.array.view(q.dtype).reshape(q.shape)[:] = q
                self._q.view(torch.uint8).view(-1).copy_(buffer.tensor, non_blocking=True)
                buffer.sent(device.query_stream)
            self._step()
            self._outputs.send([request.tail_tokens for request in self._requests])

    def wait(self) -> list[Answer]:
        """The answer of each session, once it is there. To be called once after each `launch`. Raises CapacityError or
        GpuLost."""
        return self._outputs.wait()

    def _kernels(self) -> None:
        """Launch everything. Nothing here depends on the host, so that it can be captured in a CUDA graph."""
        scale, exact = self._spec.softmax_scale, self._outputs.exact
        decode(self._q, self._pages, self._batch, scale, exact.out, exact.lse, self._top)
        for search, outputs in zip(self._searches, self._outputs.searched, strict=True):
            search.launch(self._q, self._top, outputs)

    def _follow_tails(self) -> None:
        """Tell the device how far tails have grown, and make the batch anew where one has outgrown it."""
        slots = [len(request.tail_slots) for request in self._requests]
        if self._tail_slots is None or any(a > b + TAIL_GROWTH_BLOCKS for a, b in zip(slots, self._batch_slots, strict=True)):
            self._batch_slots = slots
            self._batch = make_batch(self._scratch.partial, self._pages, self._spec, self._requests)
            track_memory(self._device, self._batch)
            self._step.reset()
        elif slots != self._tail_slots:
            for i, request in enumerate(self._requests):
                if request.tail is not None:
                    self._batch.set_slots(i, request.tail_slots)
        self._batch.set_tails(np.array([request.tail_tokens for request in self._requests], np.int32))
        self._tail_slots = slots
