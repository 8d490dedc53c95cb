"""What of a run is answered somewhere else than on the CPU: launched first, waited for last, and merged like every other part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from indexes.retrieval import Retrieval
from kvdb.attention.span import Span
from kvdb.attention.state import AttentionState
from kvdb.types import Array, Float32


class AwayFailed(Exception):
    """What was launched elsewhere brings no answer. The blocks are in main memory too, so the query can be answered there."""


class TailHasNoRoom(AwayFailed):
    """Only the tail finds no room elsewhere; a plan that leaves it on the CPU will do."""


@dataclass(frozen=True)
class Answer:
    """What came back. state: in float32. missed: float32 `[q_heads, n]`, an estimate of the log of the sum of exp(scale * q.k)
    over what was not attended, -inf for none; missed_bound: the same, never below the truth.

    scanned, retrieved: tokens looked at and attended, the mean over the queries. nbytes: read there.
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
        """Wait for it. Raises AwayFailed."""
        ...


class Away(Protocol):
    """Some spans of one layer's run, and perhaps its tail, which the CPU then leaves out.

    tail: whether the tail is among them.
    """

    @property
    def tail(self) -> bool: ...

    def takes(self, n: int) -> bool:
        """Whether it can answer n queries at once: one always, more where they are of tokens of the tail that is there."""
        ...

    @property
    def spans(self) -> Sequence[Span]:
        """Of segment views; the tail has none, since it grows."""
        ...

    def launch(self, q: Array, retrieval: Retrieval | None) -> Pending:
        """Begin to answer queries `[q_heads, n, head_dim]` of the last n tokens, where it `takes` n; for several everything is
        read. retrieval: in place of what was planned, None to keep to it. Raises AwayFailed."""
        ...
