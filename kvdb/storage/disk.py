"""The disk tier: the files of one database's segments, and what is kept beside them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Condition

from kvdb.errors import CapacityError, IntegrityError, Unavailable
from kvdb.storage.beside import BesideFiles, beside, final_name, written
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.block_table import BlockTable
from kvdb.storage.home import Home
from kvdb.storage.marks import Marks
from kvdb.storage.room import Ask, Evict, with_room
from kvdb.storage.segment_file import SegmentFile
from kvdb.storage.segment_head import Contents
from kvdb.storage.segment_writing import SegmentWriting, write_threads
from kvdb.storage.unknown_files import UnknownFiles
from kvdb.storage.unsynced_files import UnsyncedFiles
from kvdb.types import TierStats

FILE_SUFFIX = ".segment"
"""The end of the name of a segment's file."""


class SegmentFolder:
    """The files of segments in the folder of one database. Thread-safe.

    bytes_max: the most bytes of all files together, None for no limit. changes: the number of times that a file came or went.
    evict: has contexts go to make room for files, None where none may. marks: of files that the
    catalogue does not name. unknown: files that were there and that it does not know.
    """

    def __init__(self, home: Home, bytes_max: int | None) -> None:
        """home: is closed with this folder."""
        self._home = home
        self.path = home.path
        self._bytes_max = bytes_max
        self._files: dict[str, SegmentFile] = {}
        self._beside = BesideFiles(home.path)
        self._reserved = 0
        self._made = self._beside.next_number
        self._writing: set[str] = set()  # names of files that are not yet known
        self.marks = Marks(home.path)
        self.unknown = UnknownFiles(home.path)
        self._unsynced = UnsyncedFiles(home)
        self.changes = 0
        self.evict: Evict | None = None
        self._closed = False
        self._threads = write_threads()
        self._lock = Condition()

    @property
    def nbytes(self) -> int:
        """The bytes of all files, including those that are being written."""
        return self._reserved + self.unknown.nbytes

    def write(
        self, spec: str, layout: BlockLayout, tokens: int, tables: Sequence[BlockTable], *, synced: bool = True
    ) -> SegmentFile:
        """Write a segment's tables to a file; see `begin` and `finish`."""
        return self.finish(self.begin(spec, layout, len(tables), tokens), tables, synced=synced)

    def begin(self, spec: str, layout: BlockLayout, layers: int, tokens: int) -> SegmentWriting:
        """A file for a segment whose blocks are still to come; it ends with `finish` or `abandon`. spec: the digest of the
        model's spec. Contexts may go to make room, so the caller has locked no segment and no catalogue. Raises CapacityError or
        Unavailable."""
        nbytes = self._contents(FILE_SUFFIX, spec, layout, layers, tokens).nbytes
        name, contents = with_room(lambda: self._begin(spec, layout, layers, tokens), self.evict, nbytes)
        with ExitStack() as undo:
            undo.callback(self._forget, name, contents.nbytes)
            writing = SegmentWriting(self.path / name, contents, self._threads, self._home.setting)
            undo.pop_all()
        return writing

    def finish(self, writing: SegmentWriting, tables: Sequence[BlockTable], *, synced: bool = True) -> SegmentFile:
        """Write what is missing of these tables, one a layer and each whole, and keep the file. synced: wait until it has reached
        the disk; otherwise `sync` does. Raises CapacityError or Unavailable; then the file is gone."""
        with ExitStack() as undo:
            undo.callback(self.abandon, writing)
            self.marks.put_on(writing.path.name, writing.unfinished)
            file = writing.finish(tables, synced=synced)
            if synced:
                self._home.sync()
            undo.pop_all()
        with self._lock:
            self._files[file.path.name] = file
            self.changes += 1
            if not synced:
                self._unsynced.add(file)
            self._writing.remove(file.path.name)
            self._lock.notify_all()
        return file

    def abandon(self, writing: SegmentWriting) -> None:
        """Give a file up that is not finished. When this returns, none of its blocks is read any more."""
        writing.abandon()
        self._forget(writing.path.name, writing.contents.nbytes)

    def sync(self) -> None:
        """Wait until every file of a segment has reached the disk. Raises what `UnsyncedFiles.sync` does."""
        with self._lock:
            self._unsynced.sync()

    def adopt(self, name: str, spec: str, layout: BlockLayout, layers: int, tokens: int, digest: str = "") -> SegmentFile:
        """Take over a file that the folder held before it was opened, with what is kept beside it. Its contents are checked when
        they are read. digest: see `SegmentFile`. The rest as in `write`. Raises IntegrityError for one of another length, and
        Unavailable for none."""
        file = SegmentFile.adopt(self.path / name, self._contents(name, spec, layout, layers, tokens), digest)
        with self._lock:
            self._files[name] = file
            self._reserved += file.nbytes + self._beside.adopt(file)
        return file

    def find_unknown(self, is_nobodys: Callable[[str, str], bool] | None) -> None:
        """Look for the files that were there and were not adopted; see `UnknownFiles.find`."""
        self.unknown.find(self._expected(), is_nobodys)

    def remove(self, file: SegmentFile) -> None:
        with self._lock:
            if self._files.pop(file.path.name, None) is not None:
                self.marks.forget(file.path.name)
                self._unsynced.discard(file)
                self._reserved -= file.nbytes + self._beside.remove_all(file)
                self.changes += 1
                file.unlink()

    def write_beside(self, file: SegmentFile, suffix: str, content: bytes) -> None:
        """Keep some bytes in a file beside that of a segment, until they or the segment's file are removed. suffix: the end of
        its name; what is kept under that name already is replaced. Raises CapacityError or Unavailable; then nothing is kept
        there."""
        with self._lock:
            self._check_known(file)
            self._reserved -= self._beside.remove(file, suffix)
            self._reserve(len(content))
            path = beside(file, suffix)
            try:
                path.write_bytes(content)
            except OSError as error:
                self._reserved -= len(content)
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                raise Unavailable(f"{path} cannot be written: {error.strerror}") from None
            self._beside.put(file, suffix, len(content))

    def save_beside(self, file: SegmentFile, suffix: str, save: Callable[[Path, Ask], None]) -> None:
        """Keep in a file beside that of a segment what `save` writes to a path, without keeping others waiting; it asks for all
        bytes before it writes any. The rest as in `write_beside`; what indexes take is not taken for it."""
        path, asked, kept = beside(file, suffix), 0, False

        def ask(nbytes: int) -> None:
            nonlocal asked
            with self._lock:
                self._reserve(nbytes, of_indexes=False)
                asked += nbytes

        with self._lock:
            self._check_known(file)
            self._reserved -= self._beside.remove(file, suffix)
            self._writing.add(path.name)
        try:
            save(path, ask)
            size = path.stat().st_size
            ask(max(0, size - asked))  # nothing, but for a kind of somebody's own that asked for less
            kept = True
        except OSError as error:
            raise Unavailable(f"{path} cannot be written: {error.strerror}") from None
        finally:
            with self._lock:
                self._reserved -= asked
                self._writing.remove(path.name)
                if file.path.name in self._files and kept:
                    self._beside.put(file, suffix, size)
                    self._reserved += size
                else:  # the segment was removed meanwhile, or nothing was written
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
                self.changes += 1
                self._lock.notify_all()

    def read_beside(self, file: SegmentFile, suffix: str) -> bytes | None:
        """What is kept beside a segment's file, None for nothing. Raises Unavailable where it cannot be read."""
        with self._lock:
            if suffix not in self._beside.suffixes(file):
                return None
            try:
                return beside(file, suffix).read_bytes()
            except OSError as error:
                raise Unavailable(f"{beside(file, suffix)} cannot be read: {error.strerror}") from None

    def remove_beside(self, file: SegmentFile, suffix: str) -> None:
        """Remove what is kept beside a segment's file, if anything is."""
        with self._lock:
            self._reserved -= self._beside.remove(file, suffix)

    def kept_beside(self, file: SegmentFile) -> tuple[str, ...]:
        """The ends of the names of what is kept beside a segment's file."""
        with self._lock:
            return self._beside.suffixes(file)

    def stats(self) -> list[TierStats]:
        """One entry for each size of block that files hold."""
        with self._lock:
            files = list(self._files.values())
            beside_nbytes = {file: self._beside.nbytes(file) for file in files}
        stats = []
        for block_nbytes in sorted({file.contents.layout.nbytes for file in files}):
            of_size = [file for file in files if file.contents.layout.nbytes == block_nbytes]
            blocks = sum(file.contents.layers * file.contents.blocks for file in of_size)
            nbytes = sum(file.nbytes + beside_nbytes[file] for file in of_size)
            stats.append(TierStats("disk", blocks, blocks, block_nbytes, nbytes, huge=False))
        return stats

    def check_integrity(self, owned: Sequence[SegmentFile]) -> None:
        """Raises IntegrityError unless `owned` are exactly the files in the folder, each of the right length, with what is kept
        beside them. Files that are being written have no owner yet, and nothing is checked once the folder is closed."""
        with self._lock:
            if self._closed:
                return
            files, expected = dict(self._files), self._expected()
            others = self._writing | self.unknown.names
            finished = [path for path in written(self.path) if final_name(path.name) not in others]
            there = {path.name: path.stat().st_size for path in finished}
        owners = sorted(file.path.name for file in owned)
        if owners != sorted(files):
            raise IntegrityError(f"segments own {len(owners)} files, and {len(files)} are known; expected the same, each once")
        if there != expected:
            raise IntegrityError(f"{self.path} holds {len(there)} files that are not the {len(expected)} that were written")

    def close(self) -> None:
        """Wait for files that are being written, as their blocks are read until then, and give the folder up.

        Closing twice does nothing.
        """
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._writing)
        self._threads.shutdown()
        self._home.close()

    def _contents(self, name: str, spec: str, layout: BlockLayout, layers: int, tokens: int) -> Contents:
        return Contents(f"{self._home.key}/{name}", spec, layout, layers, tokens)

    def _expected(self) -> dict[str, int]:
        """The bytes of every file that the folder should hold, by name."""
        return {file.path.name: file.nbytes for file in self._files.values()} | self._beside.by_name()

    def _check_known(self, file: SegmentFile) -> None:
        if file.path.name not in self._files:
            raise Unavailable(f"{file.path} was removed; nothing is kept beside it")

    def _begin(self, spec: str, layout: BlockLayout, layers: int, tokens: int) -> tuple[str, Contents]:
        """The name of a file that is written from now on, and what it will hold. Raises CapacityError or Unavailable."""
        with self._lock:
            if self._closed:
                raise Unavailable("the database is closed; connect again")
            while any((self.path / f"{dot}{self._made}{FILE_SUFFIX}").exists() for dot in ("", ".")):
                self._made += 1  # somebody else's, which is never written over
            name, self._made = f"{self._made}{FILE_SUFFIX}", self._made + 1
            contents = self._contents(name, spec, layout, layers, tokens)
            self._reserve(contents.nbytes)
            self._writing.add(name)
        return name, contents

    def _forget(self, name: str, nbytes: int) -> None:
        """Give up a file that is not known yet, and the room that was taken for it."""
        with self._lock:
            with suppress(OSError):
                (self.path / name).unlink(missing_ok=True)  # a file that was written but cannot be read
            self._reserved -= nbytes
            self._writing.remove(name)
            self._lock.notify_all()

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
            for file, suffix, _ in kept:
                if self._has_room(nbytes):
                    break
                self._reserved -= self._beside.remove(file, suffix)
