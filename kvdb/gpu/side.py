"""What planning needs to know of the GPU, without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from indexes.retrieval import Dipr, Retrieval, TopK
from kvdb.attention.away import Away, Pending
from kvdb.attention.moves import Moves
from kvdb.attention.run import Words
from kvdb.attention.span import Span
from kvdb.catalog.segment import Segment
from kvdb.gpu.mirror import Mirror
from kvdb.storage.slot import SlotLayout
from kvdb.storage.table import BlockTable
from kvdb.storage.tier import Blocks
from kvdb.types import Array, ModelSpec
from query_optimizer.cost import GpuMachine
from query_optimizer.facts import FastMemory
from query_optimizer.wanted import Wanted

TIER = "gpu"
FLAT, COARSE = "flat", "coarse-bounds"


@dataclass(frozen=True)
class AwayPart:
    """A stretch of a run that the GPU answers. slots: int32, of its blocks in their order.

    kind: what is searched for `retrieval`, None where everything is read. turn: the row of the session's moves by which it was
    moved, -1 for none. hidden: uint64 `[blocks, words]`, what of it is overlaid, None for nothing.
    """

    span: Span
    slots: npt.NDArray[np.int32]
    kind: str | None = None
    retrieval: Retrieval | None = None
    turn: int = -1
    hidden: Words | None = None


class TailSlots(Protocol):
    """A session's own tokens of one layer on the GPU. full: whether there was no room for them, so that the CPU reads them."""

    full: bool

    def release(self) -> None: ...


class GpuSide(Protocol):
    """The GPU of one database. version: changes with what is there. machine: what it does in a second."""

    machine: GpuMachine

    @property
    def version(self) -> int: ...

    def keep(self, spec: ModelSpec, segment: Segment) -> None:
        """Copy a segment that is in use, as far as there is room."""
        ...

    def mirror(self, segment: Segment) -> Mirror | None: ...

    def tail(self, spec: ModelSpec, table: BlockTable) -> TailSlots | None:
        """A copy of a tail; None where the GPU takes no such blocks."""
        ...

    def memory(self, spec: ModelSpec) -> FastMemory | None:
        """What is free of it; None once it is lost."""
        ...

    def away(self, spec: ModelSpec, parts: Sequence[AwayPart], moves: Moves | None, tail: TailSlots | None) -> Away:
        """What answers of one layer of a session. tail: where its tail goes with them, what `tail` made."""
        ...

    def launch(self, aways: Sequence[Away], q: Array) -> Sequence[Pending]:
        """One token of each of several sessions at once, as planned: q `[sessions, q_heads, head_dim]`. What they share is read
        once. Raises AwayFailed."""
        ...

    def owned(self) -> Mapping[SlotLayout, Sequence[Blocks]]:
        """The slots of every owner, to be checked against the tiers' ledgers."""
        ...

    def close(self) -> None:
        """Give all copies back. Sessions are closed before."""
        ...


def kinds_for(wanted: Wanted) -> tuple[str, ...]:
    """What the GPU can search for a retrieval: codes for a range, channel bounds for the k largest. Others are read whole."""
    if wanted.retrieval is None:
        return FLAT, COARSE
    return (FLAT,) if isinstance(wanted.retrieval, Dipr) else (COARSE,) if isinstance(wanted.retrieval, TopK) else ()


def serves(wanted: Wanted) -> bool:
    """Whether the GPU can do as the caller hints: an index that was named has to be one of its own, for that retrieval."""
    kind = wanted.hints.index
    return kind is None or (kind in kinds_for(wanted) and (kind != COARSE or isinstance(wanted.retrieval, TopK)))
