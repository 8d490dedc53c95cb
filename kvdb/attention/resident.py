"""Decode steps whose arrays lie on a device, and stay there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvdb.attention.exact import AttentionStats
from kvdb.types import Array, Float32, KeysValues


@dataclass(frozen=True)
class StepsOnDevice:
    """Steps that were taken on a device. number: how many gave an answer. pairs: the keys and values of their tokens, in pieces.
    queries: those that were kept, `[q_heads, 1, head_dim]`; last_query: of the last step. stats: sums
    over the steps, but for the largest bound. failed: whether there was another behind them whose queries, keys, values or answer
    were not finite, which ended them."""

    number: int
    pairs: Sequence[KeysValues]
    queries: Sequence[Array]
    last_query: Array
    stats: AttentionStats
    failed: bool


class ResidentSteps(Protocol):
    """Decode steps of one layer of a session whose arrays lie on the device, one token each, without the host waiting."""

    def begin(self, steps: int, guards: Float32 | None, ranges: Float32 | None, bound: float) -> None:
        """Have room on the device for so many tokens behind those in main memory. Where searches are estimated to miss more than
        the guards allow (`RunPartition.guards`), a sign is outside of `RunPartition.ranges`, or they
        are bounded to miss more than this share of the mass, everything is read. Raises CapacityError or GpuLost."""
        ...

    def attend(self, q: Any, k: Any, v: Any) -> Any | None:
        """Append one token and answer its query, `[q_heads, 1, head_dim]`, by a tensor there of its own; None for what is no such
        tensor on the device, and then nothing was done. Raises CapacityError or GpuLost."""
        ...

    def keep_query(self) -> None:
        """Keep the last query for `take`. Raises CapacityError or GpuLost."""
        ...

    def take(self, steps: int) -> StepsOnDevice:
        """The last `steps` steps, once they are done, with their tokens. Others may follow. Raises CapacityError, and then may be
        called again, or GpuLost, and then their tokens are lost."""
        ...
