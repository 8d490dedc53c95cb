"""The catalogue of a durable database: what it says is on the disk before anybody can see it."""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Lock

import kvdb.catalog.durable.check as context_check
from kvdb.catalog.catalog import Catalog, Text
from kvdb.catalog.compaction.partly_seen import PartlySeen, Trimmed
from kvdb.catalog.compaction.relayout import Relayout
from kvdb.catalog.contexts.context import StoredContext, stored_of
from kvdb.catalog.durable.catalog_file import CatalogFile, is_gone
from kvdb.catalog.durable.catalog_records import LifeRecord, SegmentRecord, SpecRecord, ViewRecord
from kvdb.catalog.durable.segment_records import records_of
from kvdb.catalog.durable.stored_contexts import StoredContexts
from kvdb.catalog.durable.unwritten_uses import UnwrittenUses
from kvdb.catalog.durable.written_context import WrittenContext, write_context
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import Views, release_views
from kvdb.errors import AlreadyExists, CapacityError, IntegrityError, Unavailable
from kvdb.storage.backup_folder import BackupFolder
from kvdb.storage.disk import DiskTier
from kvdb.storage.store import BlockStore
from kvdb.storage.store_folder import StoreFolder
from kvdb.storage.stored_segment import StoredSegment
from kvdb.types import BackedUp, ContextUpdate, Retention, UnknownFile

log = logging.getLogger(__name__)
# size: one noun, the catalogue on the disk


def open_catalog(blocks: BlockStore, durability: str) -> Catalog:
    """The catalogue of a database: that of its store, or an empty one. durability: of contexts for which nobody asks for another.

    Raises IntegrityError, Unsupported or Unavailable, ConfigError for blocks of another size than those in the store, and
    CapacityError where the budget has no room for what stands beside them; then it has closed `blocks`.
    """
    if blocks.folder is None or blocks.disk is None:
        return Catalog()
    with ExitStack() as undo:
        undo.callback(blocks.close)
        catalog = StoredCatalog(blocks, blocks.folder, blocks.disk, durability)
        undo.pop_all()
    return catalog


class StoredCatalog(Catalog):
    """A catalogue that is kept in a file. Thread-safe.

    The files of a context's segments are written before it, and removed after it. They are marked while no row names them. What
    is marked is removed when the store is opened, unless the catalogue may be older; other files that it does not know stay. A
    context that was damaged keeps its name until it is dropped, and is never used. One of the durability
    "memory" is written when the store is closed.
    """

    on_disk = True

    def __init__(self, blocks: BlockStore, folder: StoreFolder, disk: DiskTier, durability: str) -> None:
        super().__init__()
        if is_gone(folder.catalog) and disk.store.list():
            raise IntegrityError(
                f"{folder.catalog} is gone, and {disk.store.where} is not empty; nothing of the store was touched"
            )
        self._disk = disk
        self._folder = folder.catalog.parent
        self._named: Counter[str] = Counter()  # how many views name each file
        self._commit_lock = Lock()  # names come and go in the file and in memory together
        self._durability = durability
        self._unwritten: set[str] = set()  # the names of contexts that are in memory only
        self._uses = UnwrittenUses()
        self._file = CatalogFile(folder.catalog, disk.sync)
        disk.marks.stamp = self._file.writer.stamp
        with ExitStack() as undo:
            undo.callback(self._file.close)
            folder.stamp()
            self._trusted = self._file.enter()  # whether what it does not name is nobody's
            self._damaged = self._read(blocks)
            undo.pop_all()
        if self._damaged:
            log.error("%s was damaged; nothing is answered from: %s", folder.catalog, ", ".join(sorted(self._damaged)))

    def retention(self, asked: Retention) -> Retention:
        """What the caller asks of a new context, with the configuration's durability where that is left open."""
        return replace(asked, durability=asked.durability or self._durability)

    def publish(self, context: StoredContext) -> StoredContext:
        """Write a context to the disk as its durability asks, and make it visible. Raises AlreadyExists, CapacityError and
        Unavailable."""
        self.check_free(context.name)
        if context.durability == "memory":
            with self._commit_lock:
                self.check_free(context.name)
                self._unwritten.add(context.name)
                return super().publish(context)
        with ExitStack() as undo:
            stored = write_context(context, self._disk, undo)
            with self._commit_lock:
                self.check_free(context.name)
                self._insert(stored)
                super().publish(stored.context)
            undo.pop_all()
        if context.overlay is not None:
            context.overlay.release()
        return stored.context

    def replace(self, text: Text, relayout: Relayout) -> None:
        """Write the targets to the disk, then let contexts see them; see `Catalog.replace`. Raises CapacityError or
        Unavailable."""
        if self._seeing(text, relayout):
            for target in relayout.targets:
                target.segment.write(self._disk, text.spec)
        super().replace(text, relayout)

    def trim(self, one: PartlySeen, new: Segment) -> None:
        """Write the new segment to the disk before; see `Catalog.trim`. Raises CapacityError or Unavailable."""
        new.write(self._disk, one.spec)
        super().trim(one, new)

    def _replace(self, names: Sequence[str], relayout: Relayout | Trimmed) -> None:
        """One transaction says that these contexts see the targets, before anybody sees them there."""
        with self._commit_lock, ExitStack() as undo:
            pairs = self._rewritten(names, relayout)
            for _, new in pairs:
                undo.callback(release_views, new.views)
            more = Counter[str]()  # views of each file
            segments: dict[str, SegmentRecord] = {}
            views: dict[str, tuple[ViewRecord, ...]] = {}
            for old, new in (pair for pair in pairs if pair[0].name not in self._unwritten):
                records, views[new.name] = records_of(new.spec.digest, new.views)
                segments.update((record.file, record) for record in records)
                more.update(view.file for view in views[new.name])
                more.subtract(view.file for view in records_of(old.spec.digest, old.views)[1])
            gone = [file for file, count in more.items() if count < 0 and self._named[file] + count == 0]
            with self._disk.marks.forgetting(gone):
                self._file.replace(list(segments.values()), views, gone)
            self._disk.marks.remove(segments)
            undo.pop_all()
            self._named.update(more)
            self._swap(pairs)

    def _insert(self, stored: WrittenContext) -> None:
        """Name a context in the catalogue's file; called with the lock held."""
        context, record = stored.context, stored.record
        synced = context.durability != "os"
        self._file.insert(SpecRecord.of(context.spec), stored.segments, record, context.life, synced=synced)
        self._named.update(view.file for view in record.views)
        self._disk.marks.remove([segment.file for segment in stored.segments])
        if record.overlay is not None:
            self._disk.marks.remove([record.overlay.file])

    def check_free(self, name: str) -> None:
        """Raises AlreadyExists when the name is taken, also by a context that was damaged."""
        if name in self._damaged:
            raise AlreadyExists(f"a context named {name!r} is stored and was damaged; drop it first or choose another name")
        super().check_free(name)

    def drop(self, *names: str) -> None:
        """Forget contexts by one transaction, and free the segments that nobody else holds. Raises NotFound, and CapacityError or
        Unavailable where that cannot be written; then all are still there."""
        with self._commit_lock:
            once = dict.fromkeys(names)
            present = [self.get(name) for name in once if name not in self._damaged]
            written = [context for context in present if context.name not in self._unwritten]
            stored = [view.segment.stored for context in written for view in context.views]
            named = Counter(segment.key for segment in stored if segment is not None)
            last = [key for key, views in named.items() if self._named[key] == views]
            overlays = [context.overlay.stored for context in written if context.overlay is not None]
            unnamed = [name for name in once if name not in self._unwritten]
            if unnamed:
                with self._disk.marks.forgetting([*last, *(rows.key for rows in overlays if rows is not None)]):
                    self._file.delete(unnamed, last)
            self._named.subtract(named)
            super().drop(*(context.name for context in present))
            self._damaged.difference_update(once)
            self._unwritten.difference_update(once)

    def use(self, views: Views) -> list[StoredContext]:
        """Count a use, which is written with others later, or when the store is closed."""
        contexts = super().use(views)
        self._uses.note(context.name for context in contexts)
        if self._uses.due and self._commit_lock.acquire(blocking=False):
            try:
                self._write_uses()
            finally:
                self._commit_lock.release()
        return contexts

    def update(self, name: str, change: ContextUpdate) -> StoredContext:
        """Change a context on the disk, and then for everybody. Raises what `Catalog.update` does, and CapacityError or
        Unavailable."""
        with self._commit_lock:
            context, new = self.get(name), change.name or name
            if new != name:
                self.check_free(new)
            life = context.life.changed(change)
            if name in self._unwritten:
                self._unwritten ^= {name} ^ {new} if new != name else set()
            elif new == name:
                self._file.write_lives([LifeRecord(name, life)])
            else:
                self._file.rename(name, LifeRecord(new, life))
            with self._lock:
                return self._set(context, new, life)

    def _write_uses(self) -> None:
        """Write how contexts were used; called with the commit lock held. What cannot be written is counted on in memory."""
        names = self._uses.take()
        with self._lock:
            known = [self._contexts[name] for name in names if name in self._contexts and name not in self._unwritten]
            lives = [LifeRecord(context.name, replace(context.life)) for context in known]
        if not lives:
            return
        try:
            self._file.write_lives(lives)
        except (CapacityError, IntegrityError, Unavailable) as error:
            log.warning("how contexts were used cannot be written: %s", error)

    def damaged(self) -> list[str]:
        """The names of contexts that were not as they were written when the store was opened."""
        return sorted(self._damaged)

    def unknown_files(self, *, remove: bool = False) -> list[UnknownFile]:
        """The files of segments that the catalogue does not know. remove: remove them. Raises IntegrityError where they may be of
        contexts that were damaged, and Unavailable where one cannot be removed."""
        if remove and not self._trusted:
            raise IntegrityError(
                "the store was damaged, and its files may be of contexts that are not known; drop what kvdb verify names"
            )
        return self._disk.unknown.remove() if remove else self._disk.unknown.all()

    def backup(self, folder: Path, *, link: bool = False) -> BackedUp:
        """Copy everything that is on the disk to a new folder, while contexts come and go, and read the copies. link: make hard
        links. Raises InvalidArgument for a folder that is not empty, IntegrityError, CapacityError or Unavailable."""
        target = BackupFolder(folder, self._folder, link=link)
        with ExitStack() as undo, ExitStack() as held:
            undo.callback(target.remove)
            with self._commit_lock:
                self._file.copy_to(target.catalog)
                named = [context.name for context in self.contexts() if context.name not in self._unwritten]
                contexts = [held.enter_context(self.borrow(name)) for name in named]
            copy_stored(contexts, self._disk, target)
            done = target.finish(len(contexts))
            undo.pop_all()
        return done

    def close(self) -> None:
        """Write what is in memory only, keep the evidence of every segment beside its file, and close the catalogue's file. What
        cannot be written is lost, with a line in the log."""
        self._disk.evict = None  # nothing that is stored goes for what is in memory only
        for name in sorted(self._unwritten):
            self._write_last(self.get(name))
        for segment in {view.segment for context in self.contexts() for view in context.views}:
            segment.put_away()
        with self._commit_lock:
            self._write_uses()
            try:
                self._file.close()
            except Unavailable as error:
                log.error("what was to outlive the process alone may be lost: %s", error)

    def _write_last(self, context: StoredContext) -> None:
        """Write a context that was in memory only, as the database ends."""
        try:
            with ExitStack() as undo:
                stored = write_context(context, self._disk, undo)
                with self._commit_lock:
                    self._insert(stored)
                undo.pop_all()
        except (CapacityError, IntegrityError, Unavailable) as error:
            log.error("context %r is lost, as it cannot be written: %s", context.name, error)

    def _find(self, name: str) -> StoredContext:
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
        self.take_changed()  # what was left behind before waits for `compact`
        damaged = {*records.damaged, *reader.damaged}
        self._trusted &= records.whole and not damaged  # nothing else can name a file
        if self._trusted:
            forgotten = [file for file in records.segments if not self._named[file]]
            with self._disk.marks.forgetting(forgotten):
                self._file.delete_segments(forgotten)
            self._disk.find_unknown(lambda name, stamp: name in forgotten or self._file.writer.is_past(stamp))
        else:
            self._disk.find_unknown(None)
        if not records.whole and not damaged:
            log.error("the catalogue of %s lost contexts whose names are not known", self._folder)
        return damaged


def copy_stored(contexts: Sequence[StoredContext], disk: DiskTier, target: BackupFolder) -> None:
    """Copy what is stored of contexts, which the caller holds, and read the copies. Raises IntegrityError, also where what was
    stored is damaged, CapacityError or Unavailable."""
    copied = []
    for segment in stored_of(contexts):
        suffixes = disk.kept_beside(segment)
        target.add(disk.store, segment.key, suffixes)
        copied.append((segment, suffixes))
    target.sync()
    for segment, suffixes in copied:
        copy = StoredSegment(target.segments, segment.key, segment.contents, segment.digest)
        try:
            context_check.check_copy(target.segments, copy, suffixes)
        except IntegrityError as error:
            raise IntegrityError(f"the copy of {segment.place} is not what was stored ({error}); kvdb verify") from None
