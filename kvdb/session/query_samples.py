"""Some of a layer's queries, kept for indexes to learn from and for EXPLAIN ANALYZE."""

import numpy as np

from indexes.base import Float32
from kvdb.types import Array


class QuerySamples:
    """A sample of the queries of one layer, spread evenly over all of them, and the last query.

    queries_max: how many are kept of each head; 0 keeps the last one only.
    """

    def __init__(self, queries_max: int) -> None:
        self.last: Array | None = None
        """`[q_heads, 1, head_dim]` in the spec's dtype; None before the first query."""
        self._max = queries_max
        self._step, self._seen, self._count = 1, 0, 0
        self._kept: list[Array] = []

    def add(self, q: Array) -> None:
        """Take queries `[q_heads, n, head_dim]`, of which some are kept."""
        n = q.shape[1]
        if not n:
            return
        self.last = q[:, -1:].copy()
        first = -self._seen % self._step
        self._seen += n
        if not self._max or first >= n:
            return
        picked = q[:, first :: self._step].copy()
        self._kept.append(picked)
        self._count += picked.shape[1]
        while self._count > self._max:
            whole = np.concatenate(self._kept, axis=1)[:, ::2]
            self._kept, self._count, self._step = [whole.copy()], whole.shape[1], 2 * self._step

    def all(self) -> Float32 | None:
        """The sample, float32 `[q_heads, m, head_dim]`; None if there is none."""
        return np.concatenate(self._kept, axis=1).astype(np.float32) if self._kept else None
