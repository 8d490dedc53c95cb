"""The protocol of every index: its verbs, what goes into a search and what comes out.

One index answers for one layer of one segment. Inside, each KV head has a structure of its own, shared by the query heads of
its group; a call answers all heads at once, because a call for each would cost more than a search.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

import indexes._native as _native
from indexes.blocks import Blocks
from indexes.retrieval import Retrieval

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Ask = Callable[[int], None]
"""Is told how many bytes a file will have before any is written; raises where there is no room for them."""


def unlimited(nbytes: int) -> None:
    """There is room for any file."""


class IndexCorrupt(ValueError):
    """The index does not belong to its keys: its file is cut short, or of another kind or layer, or its codes do not fit."""


@dataclass(frozen=True)
class Queries:
    """A batch of queries to one segment, from one session or several; they share the reads.

    q: float32 `[q_heads, n, head_dim]`, rotated back where the segment was moved. scale: what the softmax multiplies q.k with.
    begin, end: int64 `[n]`, query i sees tokens [begin[i], end[i]). hidden: a bit for each token (bit t % 64 of word t // 64),
    set for tokens that nobody sees. floor: float32 `[q_heads, n]`, the largest q.k outside of these tokens, -inf for none.
    outside: float32 `[q_heads, n]`, the log of the sum of exp(scale * q.k) outside, -inf for none. active_heads: bool
    `[kv_heads]`, the KV heads whose queries are to be answered, None for all; a search spends nothing on the others and finds
    nothing for them; their `missed` and its bound are -inf, and their `dense` is False.
    """

    q: Float32
    kv_heads: int
    scale: float
    begin: Int64
    end: Int64
    floor: Float32
    outside: Float32
    hidden: Words | None = None
    active_heads: npt.NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, q: npt.ArrayLike, kv_heads: int, scale: float, visible: int, hidden: Words | None = None) -> "Queries":
        """Queries `[q_heads, n, head_dim]` that see the first `visible` tokens, with nothing outside."""
        rows = np.ascontiguousarray(np.asarray(q, dtype=np.float32))
        heads, n = rows.shape[:2]
        none = np.full((heads, n), -np.inf, np.float32)
        return cls(rows, kv_heads, scale, np.zeros(n, np.int64), np.full(n, visible, np.int64), none, none, hidden)

    @property
    def rows(self) -> int:
        """The number of rows of a result, q_heads * n; row h * n + i is query i of head h."""
        return int(self.q.shape[0] * self.q.shape[1])

    @property
    def heads(self) -> int:
        """The number of active KV heads."""
        return self.kv_heads if self.active_heads is None else int(np.count_nonzero(self.active_heads))

    @cached_property
    def native(self) -> _native.Queries:
        """The queries in the form that the kernels take.

        Raises ValueError for arrays of other shapes, NaN or infinity; TypeError for other dtypes.
        """
        return _native.Queries(self.q, self.kv_heads, self.begin, self.end, self.floor, self.hidden, self.active_heads)


@dataclass(frozen=True)
class SearchResult:
    """The tokens that a search found. Row h * n + i, of query i of head h, has ids[offsets[row] : offsets[row + 1]], ascending.

    offsets: int64 `[rows + 1]`. ids: int32 `[count]`. scores: float32 `[count]`, the exact q.k. scanned: the number of keys
    looked at in any form, counted once for each KV head. nbytes: bytes read, exact keys included. missed: float32 `[q_heads, n]`,
    an estimate of the log of the sum of exp(scale * q.k) over the visible tokens that were not found; -inf only where there are
    no such tokens. missed_bound: an upper bound of the true value, +inf where nothing is known. tail: float32 `[q_heads, n,
    value_dim]`, the estimated attention output over the tokens not found, None where the index cannot estimate it or was not
    asked to. dense: bool `[q_heads, n]`, set for queries that the search gave up, because reading everything costs less; None
    where all are answered.

    `missed_bound` holds for scores as float32 computes them. In whatever order its products are added, such a score is off by at
    most (head_dim + 16) * 2**-24 of |q||k|, where 16 is room for what follows; scale times that is how far, in nats, the truth
    may lie above the bound. With 128 dimensions and a scale * |q||k| of 300 it is 0.0026.
    """

    offsets: Int64
    ids: Int32
    scores: Float32
    scanned: int
    nbytes: int
    missed: Float32
    missed_bound: Float32
    tail: Float32 | None = None
    dense: npt.NDArray[np.bool_] | None = None

    @classmethod
    def of_kernel(cls, queries: Queries, fields: "_native.SearchFields", *, tail: bool, give_up: bool) -> "SearchResult":
        """The result that a kernel gave. tail, give_up: whether the search was asked for a tail, and allowed to give up."""
        offsets, ids, scores, scanned, nbytes, missed, bound, tails, dense = fields
        shape = queries.q.shape[:2]
        return cls(
            offsets,
            ids,
            scores,
            scanned,
            nbytes,
            missed.reshape(shape),
            bound.reshape(shape),
            tails.reshape(*shape, len(tails) // max(1, shape[0] * shape[1])) if tail else None,
            dense.view(np.bool_).reshape(shape) if give_up else None,
        )


@dataclass(frozen=True)
class Cost:
    """The expected cost of a search; `query_optimizer.cost` turns it into seconds.

    nbytes: bytes read in the order in which they lie. operations: multiplications of the attention kernel; a kind with a slower
    kernel counts more of them. jumps: reads of keys, codes or links that are in no cache, on one core, each waiting for the one
    before. given_up: the expected share of the KV heads that the search gives up, or that want so much that the caller reads
    everything; the cost of that reading is not in the other numbers.
    """

    nbytes: float
    operations: float
    jumps: float = 0.0
    given_up: float = 0.0


@dataclass(frozen=True)
class BuildCost:
    """The expected cost of an index over one layer that is not built yet, on the machine that benchmarks/README.md describes.

    seconds: the time to build it. nbytes: its memory, beside the keys and values. search_share: the time of a search for few
    tokens, relative to the time of reading everything.
    """

    seconds: float
    nbytes: float
    search_share: float


class Index(Protocol):
    """An index over the keys of one layer of one segment. Searches may run at the same time as other searches, but not at the
    same time as `insert`."""

    kind: ClassVar[str]
    walks: ClassVar[bool]
    """Whether a search follows links from token to token, through hidden tokens too, so that its cost hardly grows with the
    number of tokens."""
    estimates_tail: ClassVar[bool]
    """Whether a search can estimate the attention over the tokens that it does not find."""
    blocks: Blocks

    @property
    def nbytes(self) -> int:
        """The memory of the index in bytes, beside the keys and values."""
        ...

    def insert(self, blocks: Blocks) -> None:
        """Index new tokens. `blocks` hold the tokens indexed before, and the new ones behind them; only the new ones cost
        time."""
        ...

    def search(
        self, queries: Queries, retrieval: Retrieval, *, estimate_tail: bool = False, tight: bool = False, give_up: bool = False
    ) -> SearchResult:
        """The tokens of these blocks that `retrieval` asks for, among those that the queries see.

        For Dipr the maximum runs over these tokens and queries.floor. tight: spend more time on a smaller `missed_bound`.
        give_up: the search may give up queries for which reading everything costs less; nothing is found for them, and their
        `dense` is set. Raises ValueError for queries of another shape, a range beyond the blocks, NaN or infinity.
        """
        ...

    def verify(self) -> None:
        """Check the index against its keys. Raises IndexCorrupt."""
        ...

    def save(self, path: Path, ask: Ask = unlimited) -> None:
        """Write the index, without the keys, to one file. ask: is told the bytes of that file before any is written; what it
        raises, where there is no room, is raised here."""
        ...

    @classmethod
    def load(cls, path: Path, blocks: Blocks) -> Self:
        """Read what `save` wrote, over the same keys. Raises IndexCorrupt."""
        ...

    def cost(
        self, tokens: int, rows: int, retrieval: Retrieval, *, expected_tokens: float | None = None, heads: int | None = None
    ) -> Cost:
        """The expected cost of one search with `give_up`, by `rows` queries of each KV head that see `tokens` tokens.

        expected_tokens: the mean number of tokens that earlier queries of these heads retrieved for a range; None where nothing
        is known, which stands for `indexes.selectivity.GUESS`. heads: the number of active KV heads, None for all.
        """
        ...
