"""One token of each of several sessions, answered by the GPU in as few launches as there are ways to read."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from indexes.retrieval import Retrieval
from kvdb.attention.away import Answer
from kvdb.attention.triton.decode import decode
from kvdb.attention.triton.pages import TORCH, Pages
from kvdb.gpu.asked import ROOM_BLOCKS, Asked, batch_of
from kvdb.gpu.device import Device
from kvdb.gpu.graph import Step
from kvdb.gpu.results import Results
from kvdb.gpu.scratch import Scratch
from kvdb.gpu.searching import Searching
from kvdb.gpu.side import AwayPart
from kvdb.gpu.work import at_work, track
from kvdb.types import Array, ModelSpec


class Decoding:
    """What a step of these sessions needs on the device; used by one step after the other. Sessions of one model.

    Pieces that several sessions have in common are read once. A search begins at the largest q.k of what is read whole.
    """

    def __init__(self, device: Device, scratch: Scratch, pages: Pages, spec: ModelSpec, asked: Sequence[Asked]) -> None:
        """Raises CapacityError or GpuLost."""
        self._device = device
        self._scratch = scratch
        self._pages = pages
        self._spec = spec
        self._asked = asked
        self._step = Step(self._kernels, device.query_stream)
        self._slots: list[int] | None = None
        self._room: list[int] = []
        with at_work(device, device.query_stream):
            shape = len(asked), spec.q_heads
            self._q = torch.empty((*shape, spec.head_dim), dtype=TORCH[spec.dtype], device=device.torch)
            self._top = torch.full(shape, -torch.inf, device=device.torch)
            groups: defaultdict[tuple[str, Retrieval], list[tuple[int, AwayPart]]] = defaultdict(list)
            for i, of in enumerate(asked):
                for part in of.parts:
                    if part.kind is not None and part.retrieval is not None:
                        groups[part.kind, part.retrieval].append((i, part))
            exact = [sum(part.span.tokens for part in of.parts if part.kind is None) for of in asked]
            self._results = Results(device, spec, pages.layout, exact, list(groups.values()))
            moves = [of.moves for of in asked]
            self._searches = [
                Searching(scratch, pages, spec, retrieval, found, moves) for (_, retrieval), found in groups.items()
            ]

    def launch(self, q: Array) -> None:
        """q: `[sessions, q_heads, head_dim]`, of the last token of each. Raises CapacityError or GpuLost."""
        device = self._device
        for of in self._asked:
            if of.tail is not None:
                of.tail.follow()
        with at_work(device, device.query_stream):
            self._follow()
            with device.query_staging.take(q.nbytes) as buffer:
                buffer.array.view(q.dtype).reshape(q.shape)[:] = q
                self._q.view(torch.uint8).view(-1).copy_(buffer.tensor, non_blocking=True)
                buffer.sent(device.query_stream)
            self._step()
            self._results.send([0 if of.tail is None else of.tail.tokens for of in self._asked])

    def wait(self) -> list[Answer]:
        """The answer of each session, once it is there. After each `launch` once. Raises CapacityError or GpuLost."""
        return self._results.wait()

    def _kernels(self) -> None:
        """Launches that depend on nothing on the host."""
        scale, rows = self._spec.softmax_scale, self._results.whole
        decode(self._q, self._pages, self._batch, scale, rows.out, rows.lse, self._top)
        for search, found in zip(self._searches, self._results.searched, strict=True):
            search.launch(self._q, self._top, found)

    def _follow(self) -> None:
        """Tails have grown: tell the device, and make the tables anew where they have outgrown them."""
        slots = [0 if of.tail is None else len(of.tail.slots) for of in self._asked]
        if self._slots is None or any(a > b + ROOM_BLOCKS for a, b in zip(slots, self._room, strict=True)):
            self._room = slots
            self._batch = batch_of(self._scratch.partial, self._pages, self._spec, self._asked)
            track(self._device, self._batch)
            self._step.forget()
        elif slots != self._slots:
            for i, of in enumerate(self._asked):
                if of.tail is not None:
                    self._batch.set_slots(i, of.tail.slots.astype(np.int32))
        self._batch.set_tails(np.array([0 if of.tail is None else of.tail.tokens for of in self._asked], np.int32))
        self._slots = slots
