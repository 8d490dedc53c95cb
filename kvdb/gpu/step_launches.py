"""All launches of one decode step of several sessions: one for all exact attention, one chain for each search."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from indexes.retrieval import Retrieval
from kvdb.attention.triton.batch import Batch
from kvdb.attention.triton.decode import decode
from kvdb.attention.triton.pages import TORCH, Pages
from kvdb.gpu.device import Device
from kvdb.gpu.interface import DevicePart
from kvdb.gpu.launch import track_memory
from kvdb.gpu.outputs import StepOutputs
from kvdb.gpu.request import TAIL_GROWTH_BLOCKS, AttentionRequest, make_batch
from kvdb.gpu.scratch import Scratch
from kvdb.gpu.searching import SearchLaunch
from kvdb.types import ModelSpec


class StepLaunches:
    """The tensors of a step of some sessions of one model, made once and used for one token after the other.

    Pieces that several sessions have in common are read once. A search starts from the largest q.k of what is read exactly.

    q: `[sessions, q_heads, head_dim]` on the device, the queries. batch: what is read exactly, after `follow_tails`. outputs:
    what `launch` writes.
    """

    batch: Batch

    def __init__(
        self, device: Device, scratch: Scratch, pages: Pages, spec: ModelSpec, requests: Sequence[AttentionRequest]
    ) -> None:
        """Must be called inside `launching`."""
        self._device = device
        self._scratch = scratch
        self._pages = pages
        self._spec = spec
        self._requests = requests
        self._tail_slots: list[int] | None = None
        self._batch_slots: list[int] = []
        shape = len(requests), spec.q_heads
        self.q = torch.empty((*shape, spec.head_dim), dtype=TORCH[spec.dtype], device=device.torch)
        self._top = torch.full(shape, -torch.inf, device=device.torch)
        groups: defaultdict[tuple[str, Retrieval], list[tuple[int, DevicePart]]] = defaultdict(list)
        for session, request in enumerate(requests):
            for part in request.parts:
                if part.kind is not None and part.retrieval is not None:
                    groups[part.kind, part.retrieval].append((session, part))
        exact = [request.exact_tokens for request in requests]
        self.outputs = StepOutputs(device, spec, pages.layout, exact, list(groups.values()))
        rope_shifts = [request.rope_shifts for request in requests]
        self._searches = [
            SearchLaunch(scratch, pages, spec, retrieval, group, rope_shifts) for (_, retrieval), group in groups.items()
        ]
        track_memory(device, self)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `HoldsTensors`. The batch is counted when it is made."""
        yield self.q
        yield self._top
        for search in self._searches:
            yield from search.tensors()

    def launch(self) -> None:
        """Launch everything. Nothing here depends on the host, so that it can be captured in a CUDA graph."""
        scale, exact = self._spec.softmax_scale, self.outputs.exact
        decode(self.q, self._pages, self.batch, scale, exact.out, exact.lse, self._top)
        for search, outputs in zip(self._searches, self.outputs.searched, strict=True):
            search.launch(self.q, self._top, outputs)

    def follow_tails(self) -> bool:
        """Tell the device how far tails have grown. Returns whether the batch was made anew, because one has outgrown it: then
        what was captured is of the past. Must be called inside `launching`."""
        slots = [len(request.tail_slots) for request in self._requests]
        made = self._tail_slots is None or any(a > b + TAIL_GROWTH_BLOCKS for a, b in zip(slots, self._batch_slots, strict=True))
        if made:
            self._batch_slots = slots
            self.batch = make_batch(self._scratch.partial, self._pages, self._spec, self._requests)
            track_memory(self._device, self.batch)
        elif slots != self._tail_slots:
            for i, request in enumerate(self._requests):
                if request.tail is not None:
                    self.batch.set_slots(i, request.tail_slots)
        self.batch.set_tails(np.array([request.tail_tokens for request in self._requests], np.int32))
        self._tail_slots = slots
        return made
