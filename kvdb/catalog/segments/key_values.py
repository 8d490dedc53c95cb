"""Keys and values of a session's tokens as attention sees them: moved keys at their positions, recomputed tokens in place of
stored ones."""

import numpy as np

import kvdb._native as _native
from kvdb.catalog.segments.snapshot import Snapshot
from kvdb.storage.block_table import BlockTable
from kvdb.storage.paged_segment import pinned
from kvdb.types import Array, bits


def read_tokens(snapshot: Snapshot, number: int, tail: BlockTable, start: int, k: Array, v: Array) -> None:
    """Write the KV of one layer's tokens [start, start + n) into k and v, `[kv_heads, n, head_dim]` in the dtype of the blocks,
    whose last dimension is contiguous.

    snapshot: everything before the tail, of which that layer is in main memory. None of the tokens is a gap that holds nothing.
    """
    stop = start + k.shape[1]
    with pinned(snapshot.pages(number)):
        for i, view in enumerate(snapshot.views):
            begin, end = max(start, view.begin), min(stop, view.end)
            if begin < end:
                part = np.s_[:, begin - start : end - start]
                _copy(view.segment.tables[number], begin - view.begin, k[part], v[part])
                _turn(snapshot, i, tail, k[part])
    if snapshot.overlay is not None:
        positions = snapshot.overlaid(number)
        rows = np.flatnonzero((positions >= start) & (positions < stop))
        at = positions[rows] - start
        k[:, at], v[:, at] = tail.layout.read_at(snapshot.overlay.tables[number].addresses, rows)
    begin = max(start, snapshot.layout.length)
    if begin < stop:
        part = np.s_[:, begin - start :]
        _copy(tail, begin - snapshot.layout.length, k[part], v[part])


def _copy(table: BlockTable, start: int, k: Array, v: Array) -> None:
    table.layout.read_into(table.addresses, start, k, v)


def _turn(snapshot: Snapshot, view: int, tail: BlockTable, keys: Array) -> None:
    """Turn the keys of a view, in place, to where the view stands."""
    turn = None if snapshot.moves is None else snapshot.moves.angles_of(view)
    if snapshot.moves is not None and turn is not None:
        cos, sin = turn
        rows = bits(keys)
        _native.rotate(tail.layout.native, rows, cos, -sin, snapshot.moves.interleaved, rows)  # it turns back by these angles
