"""The catalogue of a durable database: what it says is on the disk before anybody can see it."""

import logging
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from threading import Lock

from kvdb.catalog.catalog import Context
from kvdb.catalog.catalog_file import CatalogFile
from kvdb.catalog.catalog_records import ContextRecord, Records, SegmentRecord, SpecRecord, ViewRecord
from kvdb.catalog.compactable import CompactableCatalog
from kvdb.catalog.layout import Layout
from kvdb.catalog.overhead import context_nbytes, segment_nbytes
from kvdb.catalog.prefix_tree import concatenate
from kvdb.catalog.segment import Segment, SegmentView
from kvdb.errors import AlreadyExists, ConfigError, IntegrityError, Unavailable, Unsupported
from kvdb.storage.budget import Reservation
from kvdb.storage.disk import SegmentFolder
from kvdb.storage.store import BlockStore
from kvdb.storage.store_folder import StoreFolder
from kvdb.types import ModelSpec

log = logging.getLogger(__name__)


def open_catalog(blocks: BlockStore) -> CompactableCatalog:
    """The catalogue of a database: that of its store, or an empty one.

    Raises IntegrityError, Unsupported or Unavailable, ConfigError for blocks of another size than those in the store, and
    CapacityError where the budget has no room for what stands beside them; then it has closed `blocks`.
    """
    if blocks.folder is None or blocks.disk is None:
        return CompactableCatalog()
    with ExitStack() as undo:
        undo.callback(blocks.close)
        catalog = StoredCatalog(blocks, blocks.folder, blocks.disk)
        undo.pop_all()
    return catalog


class StoredCatalog(CompactableCatalog):
    """A catalogue that is kept in a file. Thread-safe.

    The files of a context's segments are written before it, and removed after it. A file that no context names is removed when
    the store is opened. A context that was damaged keeps its name until it is dropped, and is never used.
    """

    def __init__(self, blocks: BlockStore, folder: StoreFolder, disk: SegmentFolder) -> None:
        super().__init__()
        if _is_gone(folder.catalog) and any(disk.path.iterdir()):
            raise IntegrityError(f"{folder.catalog} is gone, and {disk.path} is not empty; nothing of the store was touched")
        self._disk = disk
        self._named: Counter[str] = Counter()  # how many views name each file
        self._commit_lock = Lock()  # names come and go in the file and in memory together
        self._file = CatalogFile(folder.catalog)
        with ExitStack() as undo:
            undo.callback(self._file.close)
            self._damaged = self._read(blocks)
            undo.pop_all()
        if self._damaged:
            log.error("%s was damaged; nothing is answered from: %s", folder.catalog, ", ".join(sorted(self._damaged)))

    def publish(self, context: Context) -> None:
        """Write a context to the disk, and make it visible. Raises AlreadyExists, CapacityError, Unavailable, and Unsupported for
        recomputed tokens of a blend."""
        if context.overlay is not None:
            raise Unsupported(f"context {context.name!r} holds recomputed tokens of a blend; a store cannot keep those yet")
        self.check_free(context.name)
        segments, views = [], []
        for view in context.views:
            file = view.segment.write(self._disk, context.spec.digest).path.name
            segments.append(_record(view.segment, file, context.spec))
            views.append(ViewRecord(file, view.visible, view.shift))
        layout, tokens = context.layout, None if context.plain else context.tokens
        record = ContextRecord(context.name, context.spec.digest, layout.length, layout.prefix_end, tuple(views), tokens)
        with self._commit_lock:
            self.check_free(context.name)
            self._file.insert(SpecRecord.of(context.spec), segments, record)
            self._named.update(view.file for view in views)
            super().publish(context)

    def check_free(self, name: str) -> None:
        """Raises AlreadyExists when the name is taken, also by a context that was damaged."""
        if name in self._damaged:
            raise AlreadyExists(f"a context named {name!r} is stored and was damaged; drop it first or choose another name")
        super().check_free(name)

    def drop(self, name: str) -> None:
        """Forget a context, and free the segments that nobody else holds. Raises NotFound, and CapacityError or Unavailable where
        that cannot be written; then it is still there."""
        with self._commit_lock:
            if name in self._damaged:
                self._file.delete(name, ())
                self._damaged.remove(name)
                return
            files = [view.segment.file for view in self.get(name).views]
            named = Counter(file.path.name for file in files if file is not None)
            last = [file for file, views in named.items() if self._named[file] == views]
            self._file.delete(name, last)
            self._named.subtract(named)
            super().drop(name)

    def close(self) -> None:
        """Keep the evidence of every segment beside its file, and close the catalogue's file."""
        for segment in {view.segment for context in self.contexts() for view in context.views}:
            segment.put_evidence_away()
        with self._commit_lock:
            self._file.close()

    def _find(self, name: str) -> Context:
        if name in self._damaged:
            raise IntegrityError(f"context {name!r} was damaged on the disk; drop it, import it anew, and check the disk")
        return super()._find(name)

    def _read(self, blocks: BlockStore) -> set[str]:
        """Make everything visible that is as it was written. Returns the names of the other contexts."""
        records = self._file.read()
        reader = StoredContexts(records, self._disk, blocks)
        try:
            for record in records.contexts:
                context = reader.context(record)
                if context is not None:
                    super().publish(context)
                    self._named.update(view.file for view in record.views)
        finally:
            reader.release()
        damaged = {*records.damaged, *reader.damaged}
        if records.whole and not damaged:  # nothing else can name a file
            self._file.delete_segments([file for file in records.segments if not self._named[file]])
            self._disk.remove_strangers()
        elif not damaged:
            log.error("the catalogue of %s lost contexts whose names are not known", self._disk.path.parent)
        return damaged


class StoredContexts:
    """Makes contexts of what a catalogue's file says. damaged: the names of those whose segments are not as they were written."""

    def __init__(self, records: Records, disk: SegmentFolder, blocks: BlockStore) -> None:
        self.damaged: list[str] = []
        self._records = records
        self._disk = disk
        self._blocks = blocks
        self._segments: dict[str, Segment] = {}

    def context(self, record: ContextRecord) -> Context | None:
        """The context, None for one that is damaged. Raises CapacityError, and ConfigError for blocks of another size."""
        spec = self._records.specs.get(record.spec)
        try:
            segments = [self._segment(view.file, spec) for view in record.views]
        except (IntegrityError, Unavailable) as error:
            log.error("context %r: %s", record.name, error)
            self.damaged.append(record.name)
            return None
        assert spec is not None
        views = tuple(
            SegmentView(segment, view.visible, view.shift) for segment, view in zip(segments, record.views, strict=True)
        )
        tokens = concatenate(views) if record.tokens is None else record.tokens
        beside = Reservation(self._blocks.budget, context_nbytes(len(tokens)))
        for segment in segments:
            segment.retain()
        return Context(record.name, spec, Layout(views, record.length, record.prefix_end), tokens, beside=beside)

    def release(self) -> None:
        """Release the segments; the contexts hold theirs."""
        for segment in self._segments.values():
            segment.release()

    def _segment(self, file: str, spec: ModelSpec | None) -> Segment:
        if file in self._segments:
            return self._segments[file]
        record = self._records.segments.get(file)
        if record is None or spec is None:
            raise IntegrityError(f"what the catalogue says of {file} does not match its checksum")
        tables = self._blocks.tables(spec)
        layout = tables[0].layout
        if layout.block_size != record.block_size:
            raise ConfigError(f"the store has blocks of {record.block_size} tokens; set storage.block_size to that")
        on_disk = self._disk.adopt(file, spec.digest, layout, spec.layers, len(record.tokens))
        beside = Reservation(self._blocks.budget, segment_nbytes(spec.layers, len(record.tokens)))
        segment = Segment(record.tokens, tables, base=record.base, standalone=record.standalone, beside=beside)
        segment.stand_on(self._disk, on_disk)
        self._segments[file] = segment
        return segment


def _is_gone(path: Path) -> bool:
    """Whether a catalogue is not there, or empty: it never is, once it was made."""
    return not path.exists() or not path.stat().st_size


def _record(segment: Segment, file: str, spec: ModelSpec) -> SegmentRecord:
    block_size = segment.tables[0].layout.block_size
    return SegmentRecord(file, spec.digest, block_size, segment.base, segment.standalone, segment.tokens)
