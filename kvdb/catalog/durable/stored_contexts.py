"""Makes contexts of what the catalogue of a store says."""

import logging

import kvdb.catalog.durable.stored_overlay as stored_overlay
from kvdb.catalog.contexts.context import StoredContext
from kvdb.catalog.contexts.life import Life
from kvdb.catalog.durable.catalog_records import ContextRecord, Records
from kvdb.catalog.segments.index_set import IndexSet
from kvdb.catalog.segments.layout import ContextLayout
from kvdb.catalog.segments.overhead import context_nbytes, segment_nbytes
from kvdb.catalog.segments.overlay import Overlay
from kvdb.catalog.segments.packed_ids import PackedIds
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import SegmentView
from kvdb.catalog.segments.states import SegmentStates
from kvdb.errors import ConfigError, IntegrityError, Unavailable
from kvdb.storage.budget import Reservation
from kvdb.storage.disk import DiskTier, layouts_of
from kvdb.storage.store import BlockStore
from kvdb.types import ModelSpec

log = logging.getLogger(__name__)


class StoredContexts:
    """Makes contexts of what a catalogue's file says. damaged: the names of those whose segments are not as they were written."""

    def __init__(self, records: Records, disk: DiskTier, blocks: BlockStore) -> None:
        self.damaged: list[str] = []
        self._records = records
        self._disk = disk
        self._blocks = blocks
        self._segments: dict[str, Segment] = {}

    def context(self, record: ContextRecord) -> StoredContext | None:
        """The context, None for one that is damaged. Raises CapacityError, and ConfigError for blocks of another size."""
        spec = self._records.specs.get(record.spec)
        try:
            segments = [self._segment(view.file, spec) for view in record.views]
            overlay = self._overlay(record, spec)
        except (IntegrityError, Unavailable) as error:
            log.error("context %r: %s", record.name, error)
            self.damaged.append(record.name)
            return None
        if spec is None:  # a blend without views
            self.damaged.append(record.name)
            return None
        views = tuple(
            SegmentView(segment, view.visible, view.shift) for segment, view in zip(segments, record.views, strict=True)
        )
        ids = None if record.tokens is None else PackedIds(record.tokens)
        beside = Reservation(self._blocks.budget, context_nbytes(0 if ids is None else len(ids)))
        for segment in segments:
            segment.retain()
        layout = ContextLayout(views, record.length, record.prefix_end)
        return StoredContext(record.name, spec, layout, ids, overlay, beside, self._life(record.name), salt=record.salt)

    def release(self) -> None:
        """Release the segments; the contexts hold theirs."""
        for segment in self._segments.values():
            segment.release()

    def _life(self, name: str) -> Life:
        """What the catalogue's file says of the life of a context; one that is always kept where it was damaged."""
        if name not in self._records.lives:
            log.error("what was noted of context %r was damaged; it is pinned from now on, without metadata", name)
            return Life(pinned=True)
        return self._records.lives[name]

    def _overlay(self, record: ContextRecord, spec: ModelSpec | None) -> Overlay | None:
        if record.overlay is None or spec is None:
            return None
        return stored_overlay.restore(record.overlay, self._disk, spec.digest, self._blocks.tables(spec))

    def _segment(self, file: str, spec: ModelSpec | None) -> Segment:
        if file in self._segments:
            return self._segments[file]
        record = self._records.segments.get(file)
        if record is None or spec is None:
            raise IntegrityError(f"what the catalogue says of {file} does not match its checksum")
        tables = self._blocks.tables(spec, record.format)
        if tables[0].layout.block_size != record.block_size:
            raise ConfigError(f"the store has blocks of {record.block_size} tokens; set storage.block_size to that")
        on_disk = self._disk.adopt(file, spec.digest, layouts_of(tables), len(record.ids), record.digest)
        beside = Reservation(self._blocks.budget, segment_nbytes(len(tables), len(record.ids)))
        segment = Segment(
            record.ids,
            tables,
            IndexSet(budget=self._blocks.budget),
            record.base,
            standalone=record.standalone,
            beside=beside,
            states=SegmentStates(self._blocks.budget),
        )
        segment.rounding = record.rounding
        segment.stand_on(self._disk, on_disk)
        self._segments[file] = segment
        return segment
