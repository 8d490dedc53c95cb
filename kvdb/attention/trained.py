"""Attention over the tokens that a model selects by itself, by the keys of its indexer.

The score of a token is the sum over the indexer's heads of weight * ReLU(q . k); a query attends the `top` tokens of the largest
scores among those that it sees, exactly (DeepSeek sparse attention, DeepSeek-V3.2). Of equal scores the earlier token goes first.
"""

from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

import kvdb._native as _native
from indexes.base import Int32
from kvdb.attention.block_run import BlockRun
from kvdb.attention.exact import AttentionStats
from kvdb.attention.state import AttentionState
from kvdb.storage.block_layout import BlockLayout
from kvdb.types import Array, Float32, bits


@dataclass(frozen=True, eq=False)
class IndexerQueries:
    """What a model's indexer asks, for the last n tokens. queries: float32 `[heads, n, dim]`. weights: float32 `[heads, n]`, of
    each head's score, the indexer's own scales multiplied in."""

    queries: Float32
    weights: Float32

    @property
    def tokens(self) -> int:
        """How many queries there are."""
        return int(self.queries.shape[1])


@dataclass(frozen=True, eq=False)
class Selected:
    """What each of n queries selects: the first found[i] of row i are positions in the run, ascending. ids: int32 `[n, top]`.
    found: int32 `[n]`."""

    ids: Int32
    found: Int32

    def of(self, query: int) -> Int32:
        """The positions that one query selects."""
        selected: Int32 = self.ids[query, : self.found[query]]
        return selected


@dataclass(frozen=True, eq=False)
class Indexed:
    """The keys of an indexer: blocks of this layout. top: how many tokens a query selects, fewer where it sees fewer."""

    layout: BlockLayout
    run: BlockRun
    top: int

    def select(self, selection: IndexerQueries) -> Selected:
        """What each of the last n tokens selects."""
        n = selection.tokens
        selected = Selected(np.empty((n, self.top), np.int32), np.empty(n, np.int32))
        queries, weights = np.ascontiguousarray(selection.queries), np.ascontiguousarray(selection.weights)
        blocks = self.run.addresses, self.run.counts
        _native.indexer_select(self.layout.native, queries, weights, *blocks, selected.ids, selected.found)
        return selected


@dataclass(frozen=True, eq=False)
class LastSelected:
    """The last query of a layer that selected tokens: `[q_heads, 1, head_dim]`, the positions, its answer."""

    q: Array
    positions: Int32
    state: AttentionState


def attend(
    layout: BlockLayout, run: BlockRun, q: Array, selected: Selected, scale: float, sinks: Float32 | None
) -> tuple[AttentionState, AttentionStats]:
    """Exact attention of each of the last n tokens over the positions that it selects; q: `[q_heads, n, head_dim]` in the
    layout's dtype."""
    heads, n, _ = q.shape
    out, lse = np.empty((heads, n, layout.value_dim), q.dtype), np.empty((heads, n), np.float32)
    started = perf_counter_ns()
    _native.attend_chosen(
        layout.native, bits(q), run.addresses, run.counts, selected.ids, selected.found, scale, bits(out), lse, sinks
    )
    read = int(selected.found.sum(dtype=np.int64))
    stats = AttentionStats(read / n, run.tokens, read * layout.token_nbytes, perf_counter_ns() - started)
    return AttentionState(out, lse), stats
