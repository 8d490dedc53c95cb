"""Attention on another device: it is launched first, waited for last, and merged like every other part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from indexes.retrieval import Retrieval
from kvdb.attention.block_run import Span
from kvdb.attention.state import AttentionState
from kvdb.types import Array, Float32


class DeviceFailed(Exception):
    """The device gives no answer. The blocks are in main memory too, so the CPU can answer the query."""


class TailHasNoRoom(DeviceFailed):
    """The device has no room for the tail, so the plan has to leave it on the CPU."""


@dataclass(frozen=True)
class Answer:
    """The answer of a device.

    state: in float32. missed: float32 `[q_heads, n]`, an estimate of the log of the sum of exp(scale * q.k) over what was not
    attended, -inf for none. missed_bound: an upper bound of the true value. scanned, retrieved: the numbers of tokens looked at
    and attended, means over the queries. nbytes: the bytes that the device read.
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
    """Attention on a device over some spans of one layer's run, and perhaps its tail; the CPU leaves these out.

    tail: whether the tail is among them.
    """

    @property
    def tail(self) -> bool: ...

    def takes(self, n: int) -> bool:
        """Whether it can answer n queries at once: always for n = 1, otherwise only if it has the tail to which they belong."""
        ...

    @property
    def spans(self) -> Sequence[Span]:
        """The spans of segment views that it answers, without the tail, which grows."""
        ...

    def launch(self, q: Array, retrieval: Retrieval | None) -> Pending:
        """Begin to answer queries `[q_heads, n, head_dim]` of the last n tokens, where it `takes` n; several queries read
        everything. retrieval: replaces the planned one, None keeps it. Raises DeviceFailed."""
        ...


class TailSlots(Protocol):
    """A copy of a session's tail of one layer on the GPU. full: whether there was no room for it, so that the CPU reads the
    tail."""

    full: bool

    def truncated(self) -> None:
        """Forget the tokens that were taken from the end of the tail; others may follow."""
        ...

    def release(self) -> None: ...
