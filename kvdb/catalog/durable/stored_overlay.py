"""The overlays of contexts in a store: recomputed keys and values that are stored until a session needs them.

They are stored as a segment, whose layers have as many tokens as the layer of the overlay with the most rows; behind the rows of
the other layers are zeros. The catalogue keeps the positions.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from threading import Lock

import numpy as np

from kvdb.catalog.durable.catalog_records import OverlayRecord
from kvdb.catalog.segments.overlay import Overlay
from kvdb.errors import ConfigError
from kvdb.storage.block_table import BlockTable
from kvdb.storage.disk import DiskTier, layouts_of
from kvdb.storage.stored_segment import StoredSegment


class SharedRows:
    """What is stored of one overlay, which is removed when nobody holds it any more. Thread-safe."""

    def __init__(self, disk: DiskTier, stored: StoredSegment) -> None:
        """The caller holds the first reference."""
        self.stored = stored
        self._disk = disk
        self._references = 1
        self._lock = Lock()

    def retain(self) -> None:
        with self._lock:
            assert self._references > 0, "an overlay that was removed was retained"
            self._references += 1

    def release(self) -> None:
        with self._lock:
            self._references -= 1
            if self._references == 0:
                self._disk.remove(self.stored)


class StoredOverlay(Overlay):
    """An overlay whose keys and values are stored. Its tables are empty until `loaded` returns another over the same rows."""

    def __init__(self, kept: SharedRows, tables: list[BlockTable], positions: Sequence[np.ndarray]) -> None:
        """kept: a reference, which it takes over. tables: empty, one a layer."""
        super().__init__(tables)
        self.positions = [layer.astype(np.int64) for layer in positions]
        self._kept = kept

    @property
    def stored(self) -> StoredSegment:
        return self._kept.stored

    @property
    def nbytes(self) -> int:
        return sum(extent.blocks * extent.layout.nbytes for extent in self.stored.contents.extents)

    def share(self) -> Overlay:
        self._kept.retain()
        return StoredOverlay(self._kept, [table.share() for table in self.tables], self.positions)

    def loaded(self) -> Overlay:
        """An overlay in main memory, in place of this one, which is released. Raises CapacityError, IntegrityError or
        Unavailable, and then this one is as it was."""
        loaded = Overlay([table.share() for table in self.tables])
        with ExitStack() as undo:
            undo.callback(loaded.release)
            for layer, (table, positions) in enumerate(zip(loaded.tables, self.positions, strict=True)):
                if len(positions):
                    table.reserve(self.stored.contents.tokens)
                    self.stored.read_layer(layer, table)
                    table.truncate(len(positions))
            undo.pop_all()
        loaded.positions = list(self.positions)
        self.release()
        return loaded

    def release(self) -> None:
        self._kept.release()


def store(overlay: Overlay, disk: DiskTier, spec: str, *, synced: bool = True) -> tuple[Overlay, OverlayRecord]:
    """Write an overlay to the disk. Returns another that stands on it, and what the catalogue is to keep. spec: the digest of the
    model's spec. synced: see `DiskTier.write`. Raises CapacityError or Unavailable."""
    layout = overlay.tables[0].layout
    positions = tuple(layer.astype(np.int32) for layer in overlay.positions)
    empty = [table.empty() for table in overlay.tables]
    rows = max(map(len, positions))
    if not rows:
        return Overlay(empty), OverlayRecord("", layout.block_size, positions)
    with ExitStack() as undo:
        padded = []
        for table in overlay.tables:
            padded.append(table.share())
            undo.callback(padded[-1].release)
            if rows > table.length:
                padded[-1].append(*table.layout.zeros(rows - table.length))
        stored = disk.write(spec, rows, padded, synced=synced)
    record = OverlayRecord(stored.key, layout.block_size, positions, stored.digest)
    return StoredOverlay(SharedRows(disk, stored), empty, positions), record


def restore(record: OverlayRecord, disk: DiskTier, spec: str, tables: list[BlockTable]) -> Overlay:
    """The overlay that the catalogue says is stored. spec: the digest of the model's spec. tables: empty, one a layer.
    Raises ConfigError for blocks of another size, IntegrityError for one of another length, and Unavailable for none."""
    layout = tables[0].layout
    if layout.block_size != record.block_size:
        raise ConfigError(f"the store has blocks of {record.block_size} tokens; set storage.block_size to that")
    if not record.file:
        return Overlay(tables)
    stored = disk.adopt(record.file, spec, layouts_of(tables), max(map(len, record.positions)), record.digest)
    return StoredOverlay(SharedRows(disk, stored), tables, record.positions)
