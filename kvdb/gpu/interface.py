"""What planning and sessions use of the GPU, without importing torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from indexes.retrieval import Dipr, Retrieval, TopK
from kvdb.attention.block_run import Span, Words
from kvdb.attention.device import DeviceAttention, Pending, TailSlots
from kvdb.attention.resident import ResidentSteps
from kvdb.blend.rope_shift import RopeShifts
from kvdb.catalog.segments.segment import Segment
from kvdb.gpu.mirror import Mirror
from kvdb.storage.block_table import BlockTable
from kvdb.storage.slot import SlotLayout
from kvdb.storage.tier import Blocks
from kvdb.types import Array, ModelSpec
from query_optimizer.cost import GpuMachine
from query_optimizer.facts import FastMemory
from query_optimizer.query_options import QueryOptions

TIER = "gpu"
FLAT, COARSE = "flat", "coarse-bounds"


@dataclass(frozen=True)
class DevicePart:
    """A span of a run that the GPU answers. slots: int32 `[blocks]`, where its blocks lie.

    kind: the index that is searched for `retrieval`; None where all tokens are read. rotation: the row of the session's
    RopeShifts that turns queries back for it, -1 for none. hidden: uint64 `[blocks, words]`, a bit for each overlaid token, None
    for none.
    """

    span: Span
    slots: npt.NDArray[np.int32]
    kind: str | None = None
    retrieval: Retrieval | None = None
    rotation: int = -1
    hidden: Words | None = None


class GpuInterface(Protocol):
    """The GPU of one database. version: changes whenever copies appear or go. machine: its measured speed."""

    machine: GpuMachine

    @property
    def version(self) -> int: ...

    def prefetch(self, spec: ModelSpec, segment: Segment) -> None:
        """Copy a segment in the background, as far as there is room. The caller holds a reference to it."""
        ...

    def mirror(self, segment: Segment) -> Mirror | None:
        """The copies of a segment; None before there are any."""
        ...

    def mirror_tail(self, spec: ModelSpec, table: BlockTable) -> TailSlots | None:
        """A copy of a session's tail, brought up to date before each query; None where the GPU takes no such blocks."""
        ...

    def memory(self, spec: ModelSpec) -> FastMemory | None:
        """Its free memory; None where the GPU takes no such blocks, or is lost."""
        ...

    def layer_attention(
        self, spec: ModelSpec, parts: Sequence[DevicePart], rope_shifts: RopeShifts | None, tail: TailSlots | None
    ) -> DeviceAttention:
        """Answers queries of one layer of a session. tail: made by `mirror_tail`, None where the CPU answers for the tail."""
        ...

    def launch(self, layers: Sequence[DeviceAttention], q: Array) -> Sequence[Pending]:
        """Answer one token of each of several sessions in one step: q `[sessions, q_heads, head_dim]`. Blocks that they share are
        read once. Raises DeviceFailed."""
        ...

    def holds(self, array: Any) -> bool:
        """Whether it is a tensor that lies on this GPU."""
        ...

    def resident(self, layer: DeviceAttention) -> ResidentSteps | None:
        """Steps of a session that has all tokens of its layer on this GPU, and whose arrays lie there; None where it keeps tokens
        in another format than they come in. Raises CapacityError or GpuLost."""
        ...

    def attend_resident(self, layers: Sequence[ResidentSteps], q: Any, k: Any, v: Any) -> Any | None:
        """`ResidentSteps.attend` of several sessions of one model, each once: arrays `[sessions, heads, 1, head_dim]`. Blocks
        that they share are read once. Raises CapacityError or GpuLost."""
        ...

    def owned(self) -> Mapping[SlotLayout, Sequence[Blocks]]:
        """The slots of every owner, for the check of the tiers' slots."""
        ...

    def held_segments(self) -> Sequence[Segment]:
        """The segments that are held to be copied."""
        ...

    def close(self) -> None:
        """Release all copies. Sessions must be closed before."""
        ...


def searchable_kinds(options: QueryOptions) -> tuple[str, ...]:
    """The kinds of index that the GPU can search for a retrieval: flat codes for DIPR, channel bounds for top-k, none for
    others."""
    if options.retrieval is None:
        return FLAT, COARSE
    return (FLAT,) if isinstance(options.retrieval, Dipr) else (COARSE,) if isinstance(options.retrieval, TopK) else ()


def supports(options: QueryOptions) -> bool:
    """Whether the GPU can follow the caller's hints: it must have the hinted kind of index for that retrieval."""
    kind = options.hints.index
    return kind is None or (kind in searchable_kinds(options) and (kind != COARSE or isinstance(options.retrieval, TopK)))
