"""The last queries of a layer and their answers, which are compared with other answers all at once."""

from collections.abc import Iterable

import numpy as np

from kvdb.types import Array


class RecentQueries:
    """Queries of tokens in a row, the last of a layer, and how they were answered; no more than `most`.

    Whoever changes any token that they read, or takes some back, tells it to forget them.
    """

    __slots__ = ("_end", "_kept", "_most", "_searched")

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: tuple[Array, Array] | None = None
        self._end = -1
        self._searched: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return 0 if self._kept is None else self._kept[0].shape[1]

    def add(self, q: Array, out: Array, searched: Iterable[int], end: int) -> None:
        """Take queries `[q_heads, n, head_dim]` and their answers, in place of those of the same tokens. searched: the KV heads
        that were not read whole. end: the number of tokens that the last of them saw."""
        before = end - q.shape[1] - (self._end - len(self))
        if self._kept is not None and 0 < before <= len(self):
            q, out = (np.concatenate([old[:, :before], new], axis=1) for old, new in zip(self._kept, (q, out), strict=True))
            searched = self._searched.union(searched)
        self._kept = q[:, -self._most :].copy(), out[:, -self._most :].copy()
        self._end, self._searched = end, frozenset(searched)

    def read_whole(self, heads: Iterable[int], end: int, most: int) -> tuple[Array, Array] | None:
        """The last of these queries, no more than `most`, and their answers, if all of these KV heads were read whole for them
        and the last one saw so many tokens; None if not."""
        if self._kept is None or not self.ends_at(end) or not self._searched.isdisjoint(heads) or most < 1:
            return None
        q, out = self._kept
        return q[:, -most:], out[:, -most:]

    def ends_at(self, end: int) -> bool:
        """Whether the last query saw so many tokens, or the last of those that were compared."""
        return self._end == end

    def compared(self) -> None:
        """Begin anew behind them."""
        self._kept = None

    def forget(self) -> None:
        self._kept, self._end = None, -1
