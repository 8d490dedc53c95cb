"""The disk tier: the segments of one database in a store, and what is kept beside them."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from threading import Condition

from kvdb.errors import AlreadyExists, CapacityError, IntegrityError, Unavailable
from kvdb.storage.beside import SEGMENT, BesideSegments, beside, final_name
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.block_table import BlockTable
from kvdb.storage.marks import Marks
from kvdb.storage.room import Ask, Evict, with_room
from kvdb.storage.segment_head import Contents
from kvdb.storage.segment_store import SegmentStore
from kvdb.storage.segment_writing import SegmentWriting, unseen_of, write_threads
from kvdb.storage.stored_segment import StoredSegment
from kvdb.storage.unknown_files import UnknownFiles
from kvdb.types import TierStats

log = logging.getLogger(__name__)
Layouts = tuple[BlockLayout, ...]
# size: one noun, the disk tier


class DiskTier:
    """The segments of one database in a store, within a budget. Thread-safe.

    store: where they are. bytes_max: the most bytes of all objects together, None for no limit. changes: the number of times that
    a segment came or went. evict: has contexts go to make room, None where none may. marks: of segments that the
    catalogue does not name. unknown: objects that were there and that it does not know.
    """

    def __init__(self, store: SegmentStore, bytes_max: int | None) -> None:
        """store: is closed with this tier. Raises Unavailable where it cannot be read."""
        self.store = store
        self._bytes_max = bytes_max
        self._segments: dict[str, StoredSegment] = {}
        self._beside = BesideSegments(store)
        self._reserved = 0
        self._made = self._beside.next_number
        self._writing: set[str] = set()  # keys of objects that are not yet known
        self.marks = Marks(store)
        self.unknown = UnknownFiles(store)
        self.changes = 0
        self.evict: Evict | None = None
        self._closed = False
        self._threads = write_threads()
        self._lock = Condition()

    @property
    def nbytes(self) -> int:
        """The bytes of all objects, including those that are being written."""
        return self._reserved + self.unknown.nbytes

    def write(self, spec: str, tokens: int, tables: Sequence[BlockTable], *, synced: bool = True) -> StoredSegment:
        """Write a segment's tables; see `begin` and `finish`."""
        return self.finish(self.begin(spec, layouts_of(tables), tokens, unseen_of(tables)), tables, synced=synced)

    def begin(self, spec: str, layouts: Layouts, tokens: int, unseen: tuple[int, ...] = ()) -> SegmentWriting:
        """A segment whose blocks are still to come; it ends with `finish` or `abandon`. spec: the digest of the model's spec.
        layouts: one a layer. unseen: see `Contents`. Contexts may go to make room, so the caller has locked no segment and no
        catalogue. Raises CapacityError or Unavailable."""
        nbytes = self._contents(SEGMENT, spec, layouts, tokens, unseen).nbytes
        while True:
            key, contents = with_room(lambda: self._begin(spec, layouts, tokens, unseen), self.evict, nbytes)
            with ExitStack() as undo:
                undo.callback(self._forget, key, contents.nbytes)
                try:
                    writer = self.store.begin(key, contents.nbytes, whole_pages=contents.direct)
                except AlreadyExists:  # somebody else's
                    continue
                undo.pop_all()
            return SegmentWriting(key, contents, writer, self._threads)

    def finish(self, writing: SegmentWriting, tables: Sequence[BlockTable], *, synced: bool = True) -> StoredSegment:
        """Write what is missing of these tables, one a layer and each whole, and keep the segment. synced: wait until no loss of
        power undoes it; otherwise `sync` does. Raises CapacityError or Unavailable; then it is gone."""
        with ExitStack() as undo:
            undo.callback(self.abandon, writing)
            digest = writing.finish(tables, self.marks.new(writing.key), synced=synced)
            undo.callback(self._remove, writing.key)
            segment = StoredSegment(self.store, writing.key, writing.contents, digest)
            segment.check_head()
            undo.pop_all()
        with self._lock:
            self._segments[segment.key] = segment
            self.changes += 1
            self._writing.remove(segment.key)
            self._lock.notify_all()
        return segment

    def abandon(self, writing: SegmentWriting) -> None:
        """Give a segment up that is not finished. When this returns, none of its blocks is read any more."""
        writing.abandon()
        self._forget(writing.key, writing.contents.nbytes)

    def sync(self) -> None:
        """Wait until no loss of power undoes any segment. Raises what `SegmentStore.sync` does."""
        self.store.sync()

    def adopt(self, key: str, spec: str, layouts: Layouts, tokens: int, digest: str = "") -> StoredSegment:
        """Take over a segment that the store held before it was opened, with what is kept beside it. Its contents are checked
        when they are read. digest: see `StoredSegment`. The rest as in `write`. Raises IntegrityError for one of another length,
        and Unavailable for none."""
        segment = StoredSegment.adopt(self.store, key, self._contents(key, spec, layouts, tokens, ()), digest)
        with self._lock:
            self._segments[key] = segment
            self._reserved += segment.nbytes + self._beside.adopt(key)
        return segment

    def find_unknown(self, is_nobodys: Callable[[str, str], bool] | None) -> None:
        """Look for what was there and was not adopted; see `UnknownFiles.find`."""
        self.unknown.find(self._expected(), is_nobodys)

    def remove(self, segment: StoredSegment) -> None:
        """Remove a segment, and what is kept beside it. One that cannot be removed stays, with a line in the log."""
        with self._lock:
            if self._segments.pop(segment.key, None) is not None:
                self.marks.forget(segment.key)
                self._reserved -= segment.nbytes + self._beside.remove_all(segment.key)
                self.changes += 1
                self._remove(segment.key)

    def write_beside(self, segment: StoredSegment, suffix: str, content: bytes) -> None:
        """Keep some bytes beside a segment, until they or the segment are removed. suffix: the end of their
        key; what is kept under that already is replaced. Raises CapacityError or Unavailable; then nothing is kept
        there."""
        with self._lock:
            self._check_known(segment)
            self._reserved -= self._beside.remove(segment.key, suffix)
            self._reserve(len(content))
            try:
                self.store.put(beside(segment.key, suffix), content)
            except (CapacityError, Unavailable):
                self._reserved -= len(content)
                raise
            self._beside.put(segment.key, suffix, len(content))

    def save_beside(self, segment: StoredSegment, suffix: str, save: Callable[[Path, Ask], None]) -> None:
        """Keep beside a segment what `save` writes to a path, without keeping others waiting; it asks for all
        bytes before it writes any. The rest as in `write_beside`; what indexes take is not taken for it."""
        key, asked, kept = beside(segment.key, suffix), 0, False

        def ask(nbytes: int) -> None:
            nonlocal asked
            with self._lock:
                self._reserve(nbytes, of_indexes=False)
                asked += nbytes

        with self._lock:
            self._check_known(segment)
            self._reserved -= self._beside.remove(segment.key, suffix)
            self._writing.add(key)
        try:
            with self.store.saving(key) as path:
                save(path, ask)
                size = path.stat().st_size
                ask(max(0, size - asked))  # nothing, but for a kind of somebody's own that asked for less
            kept = True
        finally:
            with self._lock:
                self._reserved -= asked
                self._writing.remove(key)
                if kept and segment.key in self._segments:
                    self._beside.put(segment.key, suffix, size)
                    self._reserved += size
                elif kept:  # the segment was removed meanwhile
                    self._remove(key)
                self.changes += 1
                self._lock.notify_all()

    def read_beside(self, segment: StoredSegment, suffix: str) -> bytes | None:
        """What is kept beside a segment, None for nothing. Raises Unavailable where it cannot be read."""
        with self._lock:
            if suffix not in self._beside.suffixes(segment.key):
                return None
            content = self.store.get(beside(segment.key, suffix))
            if content is None:
                raise Unavailable(f"{self.store.where}/{beside(segment.key, suffix)} cannot be read: it is gone")
            return content

    def local_beside(self, segment: StoredSegment, suffix: str) -> AbstractContextManager[Path]:
        """A file of what is kept beside a segment, while the body runs; see `SegmentStore.local`."""
        return self.store.local(beside(segment.key, suffix))

    def remove_beside(self, segment: StoredSegment, suffix: str) -> None:
        """Remove what is kept beside a segment, if anything is."""
        with self._lock:
            self._reserved -= self._beside.remove(segment.key, suffix)

    def kept_beside(self, segment: StoredSegment) -> tuple[str, ...]:
        """The ends of the keys of what is kept beside a segment."""
        with self._lock:
            return self._beside.suffixes(segment.key)

    def stats(self) -> list[TierStats]:
        """One entry for each size of block that segments hold. What a segment takes beside its blocks counts with its first."""
        blocks: Counter[int] = Counter()
        nbytes: Counter[int] = Counter()
        with self._lock:
            for one in self._segments.values():
                extents = one.contents.extents
                for extent in extents:
                    blocks[extent.layout.nbytes] += extent.blocks
                    nbytes[extent.layout.nbytes] += extent.nbytes
                nbytes[extents[0].layout.nbytes] += one.contents.extents_at + self._beside.nbytes(one.key)
        return [TierStats("disk", blocks[size], blocks[size], size, nbytes[size], huge=False) for size in sorted(blocks)]

    def check_integrity(self, owned: Sequence[StoredSegment]) -> None:
        """Raises IntegrityError unless `owned` are exactly the segments in the store, each of the right length, with what is kept
        beside them. Those that are being written have no owner yet, and nothing is checked once the tier is closed."""
        with self._lock:
            if self._closed:
                return
            known, expected = sorted(self._segments), self._expected()
            others = self._writing | self.unknown.names
            there = {key: nbytes for key, nbytes in self.store.list().items() if final_name(key) not in others}
        owners = sorted(one.key for one in owned)
        if owners != known:
            raise IntegrityError(f"segments own {len(owners)} files, and {len(known)} are known; expected the same, each once")
        if there != expected:
            raise IntegrityError(
                f"{self.store.where} holds {len(there)} files that are not the {len(expected)} that were written"
            )

    def close(self) -> None:
        """Wait for segments that are being written, as their blocks are read until then, and give the store up.

        Closing twice does nothing.
        """
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._writing)
        self._threads.shutdown()
        self.store.close()

    def _contents(self, key: str, spec: str, layouts: Layouts, tokens: int, unseen: tuple[int, ...]) -> Contents:
        return Contents(f"{self.store.id}/{key}", spec, layouts, tokens, unseen=unseen)

    def _expected(self) -> dict[str, int]:
        """The bytes of every object that the store should hold, by key."""
        return {key: segment.nbytes for key, segment in self._segments.items()} | self._beside.by_key()

    def _check_known(self, segment: StoredSegment) -> None:
        if segment.key not in self._segments:
            raise Unavailable(f"{segment.place} was removed; nothing is kept beside it")

    def _begin(self, spec: str, layouts: Layouts, tokens: int, unseen: tuple[int, ...]) -> tuple[str, Contents]:
        """The key of a segment that is written from now on, and what it will hold. Raises CapacityError or Unavailable."""
        with self._lock:
            if self._closed:
                raise Unavailable("the database is closed; connect again")
            key, self._made = f"{self._made}{SEGMENT}", self._made + 1
            contents = self._contents(key, spec, layouts, tokens, unseen)
            self._reserve(contents.nbytes)
            self._writing.add(key)
        return key, contents

    def _forget(self, key: str, nbytes: int) -> None:
        """Give up a segment that is not known yet, and the room that was taken for it."""
        with self._lock:
            self._reserved -= nbytes
            self._writing.remove(key)
            self._lock.notify_all()

    def _remove(self, key: str) -> None:
        """Remove an object; one that cannot be removed stays, with a line in the log."""
        try:
            self.store.remove(key)
        except Unavailable as error:
            log.warning("%s stays: %s", key, error)

    def _reserve(self, nbytes: int, *, of_indexes: bool = True) -> None:
        """Take bytes of the budget, with the lock held. of_indexes: whether indexes are removed where there is no room. Raises
        CapacityError."""
        if of_indexes and not self._has_room(nbytes):
            self._remove_indexes(nbytes)
        if not self._has_room(nbytes):
            raise CapacityError(
                f"the disk tier needs {nbytes:,} bytes more and holds {self.nbytes:,} of storage.disk_bytes_max="
                f"{self._bytes_max}; drop contexts or raise the budget"
            )
        self._reserved += nbytes

    def _has_room(self, nbytes: int) -> bool:
        return self._bytes_max is None or self.nbytes + nbytes <= self._bytes_max

    def _remove_indexes(self, nbytes: int) -> None:
        """Remove indexes, one after the other, until there is room for `nbytes`, if all of them make so much."""
        kept = self._beside.indexes()
        if self._has_room(nbytes - sum(size for _, _, size in kept)):
            for key, suffix, _ in kept:
                if self._has_room(nbytes):
                    break
                self._reserved -= self._beside.remove(key, suffix)


def layouts_of(tables: Sequence[BlockTable]) -> Layouts:
    """The layout of each of these tables."""
    return tuple(table.layout for table in tables)
