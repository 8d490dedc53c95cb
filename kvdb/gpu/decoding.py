"""One token of each of several sessions, answered by the GPU in as few launches as there are ways to read."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from indexes.retrieval import Dipr, Retrieval, TopK
from kvdb.attention.moves import Moves
from kvdb.attention.triton.batch import Batch, Piece
from kvdb.attention.triton.decode import decode
from kvdb.attention.triton.pages import TORCH, Pages
from kvdb.gpu.device import Device
from kvdb.gpu.results import Results
from kvdb.gpu.searching import Searching
from kvdb.gpu.side import COARSE, FLAT, AwayPart
from kvdb.gpu.tail import TailCopy
from kvdb.gpu.work import at_work
from kvdb.types import Array, Float32, ModelSpec

ROOM_BLOCKS = 64
"""By which a tail may grow before the tables are made anew."""


@dataclass(frozen=True)
class Asked:
    """Of one session: what is read or searched, how it was moved, and its tail, None where that is elsewhere."""

    parts: tuple[AwayPart, ...]
    moves: Moves | None = None
    tail: TailCopy | None = None

    def widened(self, retrieval: Retrieval | None) -> "Asked":
        """With another retrieval for what is searched; None: as it is."""
        if retrieval is None:
            return self
        kind = FLAT if isinstance(retrieval, Dipr) else COARSE if isinstance(retrieval, TopK) else None
        parts = [replace(part, kind=kind, retrieval=retrieval) if part.kind is not None else part for part in self.parts]
        return replace(self, parts=tuple(parts))


class Decoding:
    """What a step of these sessions needs on the device; used by one step after the other. Sessions of one model.

    Pieces that several sessions have in common are read once. A search begins at the largest q.k of what is read whole.
    """

    def __init__(self, device: Device, pages: Pages, spec: ModelSpec, asked: Sequence[Asked]) -> None:
        """Raises CapacityError or GpuLost."""
        self._device = device
        self._pages = pages
        self._spec = spec
        self._asked = asked
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
            self._searches = [Searching(device, pages, spec, retrieval, found, moves) for (_, retrieval), found in groups.items()]

    def launch(self, q: Array) -> Results:
        """q: `[sessions, q_heads, head_dim]`, of the last token of each. Its results, until the next launch. Raises CapacityError
        or GpuLost."""
        device = self._device
        for of in self._asked:
            if of.tail is not None:
                of.tail.follow()
        with at_work(device, device.query_stream):
            self._follow()
            with device.staging.take(q.nbytes) as buffer:
                buffer.array.view(q.dtype).reshape(q.shape)[:] = q
                self._q.view(torch.uint8).view(-1).copy_(buffer.tensor, non_blocking=True)
                buffer.sent(device.query_stream)
            self._kernels()
            self._results.send([0 if of.tail is None else of.tail.tokens for of in self._asked])
        return self._results

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
            self._room, self._batch = slots, self._fresh()
        for i, of in enumerate(self._asked):
            if of.tail is not None:
                if self._slots is not None and slots[i] != self._slots[i]:
                    self._batch.set_slots(i, of.tail.slots.astype(np.int32))
                self._batch.set_tokens(i, of.tail.tokens)
        self._slots = slots

    def _fresh(self) -> Batch:
        angles: dict[bytes, tuple[int, Float32, Float32]] = {}

        def turn(moves: Moves | None, row: int) -> int:
            """The row of an angle among those of all sessions, each once."""
            if row < 0 or moves is None:
                return -1
            return angles.setdefault(moves.cos[row].tobytes(), (len(angles), moves.cos[row], moves.sin[row]))[0]

        sequences = []
        for of in self._asked:
            pieces = []
            for part in of.parts:
                if part.kind is None:
                    row = turn(of.moves, part.turn)
                    key = None if part.hidden is not None else (int(part.slots[0]), len(part.slots), part.span.tokens, row)
                    pieces.append(Piece(part.slots, part.span.tokens, row, part.hidden, key))
            tail = np.zeros(0, np.int32) if of.tail is None else of.tail.slots.astype(np.int32)
            sequences.append([*pieces, Piece(tail, 0 if of.tail is None else of.tail.tokens)])
        all_angles = [np.stack(rows) for rows in zip(*((cos, sin) for _, cos, sin in angles.values()), strict=True)]
        return Batch(
            sequences,
            self._spec.q_heads // self._spec.kv_heads,
            self._device.torch,
            (all_angles[0], all_angles[1]) if angles else None,
            layout=self._pages.layout,
            interleaved=self._spec.rope is not None and self._spec.rope.layout == "interleaved",
            room=ROOM_BLOCKS,
        )
