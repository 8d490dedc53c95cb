"""Some of a layer's queries, kept for indexes to learn from and for EXPLAIN ANALYZE."""

import numpy as np

from indexes.base import Float32
from kvdb.errors import CapacityError
from kvdb.storage.budget import Reservation
from kvdb.types import Array


class QuerySamples:
    """A sample of the queries of one layer, spread evenly over all of them, and the last query.

    queries_max: the number of queries kept for each head; 0 keeps only the last one. reserved: the bytes of the budget that the
    sample takes; fewer queries are kept if the budget has no room.
    """

    def __init__(self, queries_max: int, reserved: Reservation) -> None:
        self.last: Array | None = None
        """`[q_heads, 1, head_dim]` in the spec's dtype; None before the first query."""
        self._max = queries_max
        self._step, self._seen, self._count = 1, 0, 0
        self._kept: list[Array] = []
        self._reserved = reserved

    @property
    def every(self) -> int:
        """One of this many queries is kept now; 0 where none is."""
        return self._step if self._max else 0

    @property
    def number(self) -> int:
        """How many queries are kept, beside the last one."""
        return self._count

    @property
    def next_in(self) -> int:
        """How many queries come before the next one that is kept."""
        return -self._seen % self._step

    def pass_by(self, n: int) -> None:
        """Count n queries of which none is kept."""
        self._seen += n

    def add(self, q: Array) -> None:
        """Take queries `[q_heads, n, head_dim]`, of which some are kept."""
        n = q.shape[1]
        if not n:
            return
        self.last = q[:, -1:].copy()
        before, self._seen = self._seen, self._seen + n
        if not self._max or -before % self._step >= n:  # nearly always, one query at a time
            return
        while self._count + len(range(-before % self._step, n, self._step)) > self._max:
            self._thin_out()
        picked = q[:, -before % self._step :: self._step].copy()
        if not picked.size:
            return
        try:
            self._reserved.resize(self._reserved.nbytes + picked.nbytes)
        except CapacityError:
            self._thin_out()
            return
        self._kept.append(picked)
        self._count += picked.shape[1]

    def release(self) -> None:
        """Forget all queries; they no longer count in the budget."""
        self.last, self._kept, self._count = None, [], 0
        self._reserved.release()

    def all(self) -> Float32 | None:
        """The sample, float32 `[q_heads, m, head_dim]`; None if there is none."""
        return np.concatenate(self._kept, axis=1).astype(np.float32) if self._kept else None

    def _thin_out(self) -> None:
        """Keep every second query, also of those to come."""
        self._step *= 2
        if self._kept:
            whole = np.concatenate(self._kept, axis=1)[:, ::2].copy()
            self._kept, self._count = [whole], whole.shape[1]
            self._reserved.resize(whole.nbytes)
