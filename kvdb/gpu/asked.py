"""What is asked of the GPU, and its tables on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from indexes.retrieval import Dipr, Retrieval, TopK
from kvdb.attention.moves import Moves
from kvdb.attention.triton.batch import Batch, Piece, Workspace
from kvdb.attention.triton.pages import Pages
from kvdb.gpu.side import COARSE, FLAT, AwayPart
from kvdb.gpu.tail import TailCopy
from kvdb.types import Float32, ModelSpec

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


def batch_of(partial: Workspace, pages: Pages, spec: ModelSpec, asked: Sequence[Asked]) -> Batch:
    """What is read whole of each session, its tail last, with room to grow; what several read is there once. partial: room for
    partial states. Inside `at_work`."""
    angles: dict[bytes, tuple[int, Float32, Float32]] = {}

    def turn(moves: Moves | None, row: int) -> int:
        """The row of an angle among those of all sessions, each once."""
        if row < 0 or moves is None:
            return -1
        return angles.setdefault(moves.cos[row].tobytes(), (len(angles), moves.cos[row], moves.sin[row]))[0]

    sequences = []
    for of in asked:
        pieces = []
        for part in of.parts:
            if part.kind is None:
                row = turn(of.moves, part.turn)
                key = None if part.hidden is not None else (int(part.slots[0]), len(part.slots), part.span.tokens, row)
                pieces.append(Piece(part.slots, part.span.tokens, row, part.hidden, key))
        tail = Piece(np.zeros(0, np.int32), 0) if of.tail is None else Piece(of.tail.slots.astype(np.int32), of.tail.tokens)
        sequences.append([*pieces, tail])
    rows = list(angles.values())
    return Batch(
        sequences,
        spec.q_heads // spec.kv_heads,
        pages.slab.device,
        (np.stack([cos for _, cos, _ in rows]), np.stack([sin for _, _, sin in rows])) if rows else None,
        layout=pages.layout,
        interleaved=spec.rope is not None and spec.rope.layout == "interleaved",
        room=ROOM_BLOCKS,
        workspace=partial,
    )
