"""Attention on another device: it is launched first, waited for last, and merged like every other part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from indexes.retrieval import Retrieval
from kvdb.attention.block_run import Span
from kvdb.attention.state import AttentionState
from kvdb.types import Array, Float32


class DeviceFailed(Exception):
    """The device brings no answer. The blocks are in main memory too, so the CPU can answer the query."""


class TailHasNoRoom(DeviceFailed):
    """The device has no room for the tail; a plan that leaves the tail on the CPU will do."""


@dataclass(frozen=True)
class Answer:
    """The answer of a device.

    state: in float32. missed: float32 `[q_heads, n]`, an estimate of the log of the sum of exp(scale * q.k) over what was not
    attended, -inf for none. missed_bound: the same, never below the truth. scanned, retrieved: how many tokens were looked at and
    attended, means over the queries. nbytes: how many bytes the device read.
    """

    state: AttentionState
    missed: Float32
    missed_bound: Float32
    scanned: float
    retrieved: float
    nbytes: int


class Pending(Protocol):
    """A query under way."""

    def result(self) -> Answer:
        """Wait for it. Raises DeviceFailed."""
        ...


class DeviceAttention(Protocol):
    """Some spans of one layer's run, and perhaps its tail, which the CPU then leaves out.

    tail: whether the tail is among them.
    """

    @property
    def tail(self) -> bool: ...

    def takes(self, n: int) -> bool:
        """Whether it can answer n queries at once: one always, several only if it has the tail that they belong to."""
        ...

    @property
    def spans(self) -> Sequence[Span]:
        """The spans of segment views that it answers; the tail, which grows, is none of them."""
        ...

    def launch(self, q: Array, retrieval: Retrieval | None) -> Pending:
        """Begin to answer queries `[q_heads, n, head_dim]` of the last n tokens, where it `takes` n; for several everything is
        read. retrieval: in place of what was planned, None to keep to it. Raises DeviceFailed."""
        ...


class TailSlots(Protocol):
    """A copy of a session's tail of one layer on the GPU. full: whether there was no room for it, so that the CPU reads the
    tail."""

    full: bool

    def truncated(self) -> None:
        """Tokens were taken from the end of the tail; others may follow."""
        ...

    def release(self) -> None: ...
