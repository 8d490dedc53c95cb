"""Queries that are kept beside a segment, for kinds of index that learn from them."""

from collections.abc import Mapping

from indexes.base import Float32
from kvdb.errors import CapacityError
from kvdb.storage.budget import CpuBudget


class StoredQueries:
    """Queries by layer, float32 `[q_heads, m, head_dim]`, whose bytes count in the budget until `release`.

    Not thread-safe: one import or one segment owns them.
    """

    def __init__(self, budget: CpuBudget) -> None:
        self.by_layer: dict[int, Float32] = {}
        self._budget = budget

    @classmethod
    def as_far_as_they_fit(cls, budget: CpuBudget, queries: Mapping[int, Float32]) -> "StoredQueries":
        """Queries of as many layers as the budget has room for."""
        kept = cls(budget)
        for layer, array in queries.items():
            try:
                kept.put(layer, array)
            except CapacityError:
                break
        return kept

    def put(self, layer: int, queries: Float32) -> None:
        """Keep the queries of one layer, in place of those that were kept before. Raises CapacityError, and then keeps those."""
        before = self.by_layer.get(layer)
        self._budget.take(queries.nbytes)
        self.by_layer[layer] = queries
        if before is not None:
            self._budget.give(before.nbytes)

    def release(self) -> None:
        """Forget all queries; they no longer count in the budget. Releasing twice does nothing."""
        gone, self.by_layer = self.by_layer, {}
        self._budget.give(sum(queries.nbytes for queries in gone.values()))
