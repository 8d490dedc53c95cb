"""Two answers to one query that are to be compared."""

from dataclasses import dataclass
from typing import Protocol

from kvdb.attention.exact import AttentionStats
from kvdb.attention.state import AttentionState
from kvdb.planning.prepared import Prepared
from kvdb.types import Array
from query_optimizer.query_options import QueryOptions


class Execute(Protocol):
    """Answers queries `[q_heads, n, head_dim]` of the layer by a plan: `Layer.execute`."""

    def __call__(
        self, prepared: Prepared, q: Array, options: QueryOptions, observed: bool, *, judged: bool
    ) -> tuple[AttentionState, AttentionStats]: ...


@dataclass(frozen=True)
class Comparison:
    """An answer that is to be compared with another.

    served: the plan of the answer, which reads `heads` whole. shadow: the plan of the other. heads: the KV heads that are
    compared. in_use: whether the other is how queries are served. extra: whether the answer is exact only to be compared. unlike:
    whether the heads were read whole because the query is unlike those for which their ways were proven.
    """

    served: Prepared
    shadow: Prepared
    heads: tuple[int, ...]
    in_use: bool
    extra: bool = False
    unlike: bool = False
