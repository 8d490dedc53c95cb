"""The file of a segment that is not whole yet."""

from threading import Lock

import kvdb.storage.segment_head as segment_head
from kvdb.storage.block_table import BlockTable
from kvdb.storage.disk import DiskTier
from kvdb.storage.segment_writing import SegmentWriting
from kvdb.storage.stored_segment import StoredSegment


class EarlyFile:
    """Writes a segment to the disk while it comes, so that its end has little to wait for. Thread-safe.

    The file is begun with the first blocks that are worth a write. What was written early outlives nothing until the segment is
    named in a catalogue; until then nobody sees it.
    """

    def __init__(self, disk: DiskTier, spec: str, tokens: int, *, synced: bool) -> None:
        """spec: the digest of the model's spec. tokens: of the whole segment. synced: whether it is to have reached the disk in
        the end."""
        self.disk = disk
        self._spec = spec
        self._tokens = tokens
        self._synced = synced
        self._writing: SegmentWriting | None = None
        self._lock = Lock()

    def take(self, layer: int, tables: list[BlockTable]) -> None:
        """Write what has come of a layer, without waiting for it. tables: one a layer; none of their blocks is freed or changed
        before `finish` or `abandon`. Contexts may go to make room, so the caller has locked no segment and no catalogue. Raises
        CapacityError or Unavailable where something cannot be written, and then again until `abandon`."""
        with self._lock:
            table = tables[layer]
            if self._writing is None and table.nbytes > segment_head.PIECE_BYTES:
                layouts = tuple(one.layout.in_format(table.layout.format) for one in tables)
                self._writing = self.disk.begin(self._spec, layouts, self._tokens)
            if self._writing is not None:
                self._writing.take(layer, table)

    def finish(self, tables: list[BlockTable]) -> StoredSegment | None:
        """What is stored of these tables, each whole; None where nothing was begun. Raises CapacityError or Unavailable; then
        nothing is."""
        with self._lock:
            writing, self._writing = self._writing, None
            return None if writing is None else self.disk.finish(writing, tables, synced=self._synced)

    def abandon(self) -> None:
        """Remove what was written. When this returns, no block is read any more. After the end it does nothing."""
        with self._lock:
            writing, self._writing = self._writing, None
            if writing is not None:
                self.disk.abandon(writing)
