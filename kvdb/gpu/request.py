"""What one session's layer reads and searches on the GPU, and the tables for it on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from indexes.retrieval import Dipr, Retrieval, TopK
from kvdb.attention.triton.batch import Batch, PartialBuffer, Piece
from kvdb.attention.triton.pages import Pages
from kvdb.blend.rope_shift import RopeShifts
from kvdb.gpu.interface import COARSE, FLAT, DevicePart
from kvdb.gpu.tail import TailMirror
from kvdb.types import Float32, ModelSpec

TAIL_GROWTH_BLOCKS = 64
"""Blocks by which a tail may grow before its tables are made anew."""


@dataclass(frozen=True)
class AttentionRequest:
    """The parts that the GPU reads or searches for one session, the RoPE shifts of its moved views, and its tail. tail: None
    where the CPU answers for it."""

    parts: tuple[DevicePart, ...]
    rope_shifts: RopeShifts | None = None
    tail: TailMirror | None = None

    @property
    def tail_tokens(self) -> int:
        """Tokens of the tail that lie on the GPU."""
        return 0 if self.tail is None else self.tail.tokens

    @property
    def tail_slots(self) -> npt.NDArray[np.int32]:
        """Slots of the tail, `[blocks]`; more than its tokens need."""
        return np.zeros(0, np.int32) if self.tail is None else self.tail.slots.astype(np.int32)

    @property
    def exact_tokens(self) -> int:
        """Tokens that are read exactly, without the tail."""
        return sum(part.span.tokens for part in self.parts if part.kind is None)

    def with_retrieval(self, retrieval: Retrieval | None) -> "AttentionRequest":
        """The same request with another retrieval for all searched parts; unchanged for None."""
        if retrieval is None:
            return self
        kind = FLAT if isinstance(retrieval, Dipr) else COARSE if isinstance(retrieval, TopK) else None
        parts = [replace(part, kind=kind, retrieval=retrieval) if part.kind is not None else part for part in self.parts]
        return replace(self, parts=tuple(parts))


def make_batch(partial: PartialBuffer, pages: Pages, spec: ModelSpec, requests: Sequence[AttentionRequest]) -> Batch:
    """The batch of all parts that are read exactly, each session's tail last with room to grow. A part that several sessions read
    is in it once. partial: where partial states go. Must be called inside `launching`."""
    angles: dict[bytes, tuple[int, Float32, Float32]] = {}

    def rotation(rope_shifts: RopeShifts | None, row: int) -> int:
        """The row of these angles in the batch, where equal angles of several sessions stand once."""
        if row < 0 or rope_shifts is None:
            return -1
        return angles.setdefault(rope_shifts.cos[row].tobytes(), (len(angles), rope_shifts.cos[row], rope_shifts.sin[row]))[0]

    sequences = []
    for request in requests:
        pieces = []
        for part in request.parts:
            if part.kind is None:
                row = rotation(request.rope_shifts, part.rotation)
                key = None if part.hidden is not None else (int(part.slots[0]), len(part.slots), part.span.tokens, row)
                pieces.append(Piece(part.slots, part.span.tokens, row, part.hidden, key))
        sequences.append([*pieces, Piece(request.tail_slots, request.tail_tokens)])
    rows = list(angles.values())
    return Batch(
        sequences,
        spec.q_heads // spec.kv_heads,
        pages.slab.device,
        (np.stack([cos for _, cos, _ in rows]), np.stack([sin for _, _, sin in rows])) if rows else None,
        layout=pages.layout,
        interleaved=spec.rope is not None and spec.rope.layout == "interleaved",
        room=TAIL_GROWTH_BLOCKS,
        workspace=partial,
    )
