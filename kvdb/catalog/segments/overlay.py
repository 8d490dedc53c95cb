"""Overlays: recomputed keys and values of some tokens of a context, layer by layer. Stored blocks are never rewritten."""

from contextlib import ExitStack

import numpy as np

from indexes.base import Int64
from kvdb.storage.block_table import BlockTable
from kvdb.storage.stored_segment import StoredSegment
from kvdb.types import Array


class Overlay:
    """One block table a layer, whose row i is the token at `positions[layer][i]`, its key rotated to that position.

    It owns its tables. `share` gives another overlay over the same blocks; a shared block is copied before it is written.
    version: how often rows were added.
    """

    def __init__(self, tables: list[BlockTable]) -> None:
        """tables: empty, one a layer; the overlay takes them over."""
        self.tables = tables
        self.positions: list[Int64] = [np.zeros(0, np.int64) for _ in tables]
        self.version = 0

    @property
    def stored(self) -> StoredSegment | None:
        """What is stored of it, until its rows are loaded; None for one in main memory."""
        return None

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    @property
    def empty(self) -> bool:
        return not any(len(positions) for positions in self.positions)

    def add(self, layer: int, positions: Int64, k: Array, v: Array) -> None:
        """Add rows for tokens that have none in this layer yet: positions int64 `[n]`, k and v `[kv_heads, n, head_dim]`.

        Raises NonFiniteError or CapacityError, and then the overlay is as it was.
        """
        self.tables[layer].append(k, v)
        self.positions[layer] = np.concatenate([self.positions[layer], positions])
        self.version += 1

    def share(self) -> "Overlay":
        """Another overlay over the same blocks."""
        twin = Overlay([table.share() for table in self.tables])
        twin.positions = list(self.positions)
        return twin

    def cut(self, tokens: int) -> "Overlay":
        """Another overlay, of the rows at positions before `tokens`; those before the first that is left out share their blocks.
        Raises CapacityError, and then nothing was taken."""
        with ExitStack() as undo:
            twin = Overlay([])
            undo.callback(twin.release)
            for table, positions in zip(self.tables, self.positions, strict=True):
                kept = np.flatnonzero(positions < tokens)
                twin.tables.append(table.picked(kept))
                twin.positions.append(positions[kept])
            undo.pop_all()
        return twin

    def loaded(self) -> "Overlay":
        """An overlay in main memory in place of this one: itself."""
        return self

    def release(self) -> None:
        """Give every block back; it is empty afterwards."""
        for table in self.tables:
            table.release()
        self.positions = [np.zeros(0, np.int64) for _ in self.tables]
