"""One call on a layer: the queries, and what they are asked with."""

from dataclasses import dataclass

from kvdb.attention.block_run import BlockRun
from kvdb.attention.partition import RunPartition
from kvdb.storage.block_layout import BlockLayout
from kvdb.types import Array, Float32
from query_optimizer.query_options import QueryOptions


@dataclass(frozen=True)
class AttentionQuery:
    """One call: queries q, `[q_heads, n, head_dim]` in the layout's dtype, which belong to the run's last n tokens.

    observed: whether the searched parts receive an observation; n is 1 then. judged: whether KV heads are read whole for queries
    that are unlike those for which their ways were proven (`RunPartition.ranges`). sinks: float32 `[q_heads]`, a logit of each
    query head that weighs in the softmax and has no value; None for none. window: a query sees the last so many tokens up to its
    own, 0 for all; what it sees is read whole.
    """

    layout: BlockLayout
    run: BlockRun
    q: Array
    scale: float
    options: QueryOptions
    observed: bool = False
    judged: bool = True
    sinks: Float32 | None = None
    window: int = 0

    def searches(self, partition: RunPartition) -> bool:
        """Whether indexes can answer. They cannot if a query belongs to an earlier token, which sees less than the searched parts
        hold."""
        return bool(partition.searched) and not self.window and self.q.shape[1] <= partition.behind(self.run)

    @property
    def ignores_sinks(self) -> bool:
        """Whether a range begins at the largest score behind the sink tokens: where the caller names no retrieval."""
        return self.options.retrieval is None
