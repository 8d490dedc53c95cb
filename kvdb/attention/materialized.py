"""The keys of one layer of a blended session, rotated to their true positions, for the attention of recomputed tokens.

Decoding turns the query of each moved view instead, and copies nothing. But thousands of queries read every key so often that
turning each key once costs less than a per cent of reading them; the next layer uses the same memory again.
"""

import numpy as np

import kvdb._native as _native
from kvdb.attention.state import AttentionState
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.block_table import BlockTable
from kvdb.types import Addresses, Array, Float32, Positions, bits

Turn = tuple[Float32, Float32]


class MaterializedKeys:
    """Memory for one layer's keys and values at positions [0, length)."""

    def __init__(self, layout: BlockLayout, length: int) -> None:
        self._layout = layout
        blocks = layout.blocks_for(length)
        self._memory = np.empty(blocks * layout.nbytes, np.uint8)
        first = self._memory.ctypes.data
        self._table: Addresses = np.uint64(first) + np.arange(blocks, dtype=np.uint64) * np.uint64(layout.nbytes)
        self._counts = np.full(blocks, layout.block_size, np.int32)
        if blocks:
            self._counts[-1] = length - (blocks - 1) * layout.block_size

    def place(self, table: BlockTable, visible: int, begin: int, turn: Turn | None, *, interleaved: bool) -> None:
        """Copy the first `visible` tokens of a view, moved so that they begin at position `begin`."""
        cos, sin = (None, None) if turn is None else turn
        geometry, source = self._layout.native, table.addresses
        if not table.layout.codec.has_rows:
            plain = MaterializedKeys(self._layout, visible)
            self._layout.write(plain._table, 0, *table.read(0, visible))
            source = plain._table
        _native.place(geometry, source, 0, self._table, begin, visible, cos, sin, interleaved)

    def scatter(self, table: BlockTable, positions: Positions, first_row: int = 0) -> None:
        """Copy rows [first_row, ...) of an overlay to their positions."""
        if len(positions):
            _native.scatter(self._layout.native, table.addresses, first_row, self._table, positions)

    def read(self, positions: Positions) -> tuple[Array, Array]:
        """Keys, `[kv_heads, n, head_dim]`, and values, `[kv_heads, n, value_dim]`, at some positions."""
        return self._layout.read_at(self._table, positions)

    def attend(self, q: Array, positions: Positions, scale: float) -> AttentionState:
        """Attention of queries `[q_heads, n, head_dim]` at ascending positions, each over everything up to its own."""
        out, lse = np.empty((*q.shape[:2], self._layout.value_dim), q.dtype), np.empty(q.shape[:2], np.float32)
        ends = positions + 1
        _native.attend(self._layout.native, bits(q), self._table, self._counts, 0, scale, bits(out), lse, ends=ends)
        return AttentionState(out, lse)
