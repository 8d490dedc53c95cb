"""The disk tier: the folder of one database, with a file for each segment that was offloaded, and what is kept beside it."""

import fcntl
import os
import secrets
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition

from kvdb.errors import CapacityError, IntegrityError, Unavailable
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.block_table import BlockTable
from kvdb.storage.segment_file import Contents, SegmentFile
from kvdb.types import TierStats

LOCK = "lock"
MARKER = b"kvdb: segments of one database, removed when it ends\n"
"""The contents of the lock file in a database's folder. A folder without it is somebody else's and never touched."""
FILE_SUFFIX, BESIDE_SUFFIX = ".segment", ".evidence"
"""The ends of the names of segments' files, and of what is kept beside them."""
SUFFIX = ".segments"
"""The end of the names of databases' folders below storage.disk_path."""


class SegmentFolder:
    """Segment files in a folder below `path` that belongs to one database and is removed with it. Thread-safe.

    The folder has a file with MARKER that is locked as long as its process lives. The files of dead processes are removed from
    folders with that marker; nothing else below `path` is touched. bytes_max: the most bytes of all files together, None for no
    limit. changes: the number of times that a file came or went.
    """

    def __init__(self, path: Path, bytes_max: int | None) -> None:
        """Raises Unavailable for a folder that cannot be made or written to."""
        self._bytes_max = bytes_max
        self._files: dict[str, SegmentFile] = {}
        self._beside: dict[str, int] = {}  # the bytes of the file beside each of these
        self._reserved = 0
        self._made = 0
        self._writing: set[str] = set()  # names of files that are not yet known
        self.changes = 0
        self._closed = False
        self._lock = Condition()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.path, alive = _own_folder(path)
        except OSError as error:
            raise Unavailable(
                f"storage.disk_path {path} cannot be used: {error.strerror}; expected a folder that can be written to"
            ) from None
        self._finalizer = weakref.finalize(self, _remove_own, self.path, alive, os.getpid())

    @property
    def nbytes(self) -> int:
        """The bytes of all files, including those that are being written."""
        return self._reserved

    def write(self, spec: str, layout: BlockLayout, tokens: int, tables: Sequence[BlockTable]) -> SegmentFile:
        """Write a segment's tables to a file. spec: the digest of the model's spec. Raises CapacityError or Unavailable."""
        with self._lock:
            if self._closed:
                raise Unavailable("the database is closed; connect again")
            name, self._made = f"{self._made}{FILE_SUFFIX}", self._made + 1
            contents = Contents(f"{self.path.name}/{name}", spec, layout, len(tables), tokens)
            self._reserve(contents.nbytes)
            self._writing.add(name)
        file = None
        try:
            file = SegmentFile.write(self.path / name, contents, tables)
        finally:
            with self._lock:
                if file is None:
                    self._reserved -= contents.nbytes
                    (self.path / name).unlink(missing_ok=True)  # a file that was written but cannot be read
                else:
                    self._files[name] = file
                    self.changes += 1
                self._writing.remove(name)
                self._lock.notify_all()
        return file

    def remove(self, file: SegmentFile) -> None:
        with self._lock:
            if self._files.pop(file.path.name, None) is not None:
                self._remove_beside(file)
                self._reserved -= file.nbytes
                self.changes += 1
                file.unlink()

    def write_beside(self, file: SegmentFile, content: bytes) -> None:
        """Keep some bytes in a file beside that of a segment, instead of those that are kept there, until they or the segment's
        file are removed. Raises CapacityError or Unavailable; then nothing is kept there."""
        path = _beside(file)
        with self._lock:
            if file.path.name not in self._files:
                raise Unavailable(f"{file.path} was removed; nothing is kept beside it")
            self._remove_beside(file)
            self._reserve(len(content))
            try:
                path.write_bytes(content)
            except OSError as error:
                self._reserved -= len(content)
                path.unlink(missing_ok=True)
                raise Unavailable(f"{path} cannot be written: {error.strerror}") from None
            self._beside[file.path.name] = len(content)

    def read_beside(self, file: SegmentFile) -> bytes | None:
        """What is kept beside a segment's file, None for nothing. Raises Unavailable where it cannot be read."""
        with self._lock:
            if file.path.name not in self._beside:
                return None
            try:
                return _beside(file).read_bytes()
            except OSError as error:
                raise Unavailable(f"{_beside(file)} cannot be read: {error.strerror}") from None

    def remove_beside(self, file: SegmentFile) -> None:
        """Remove what is kept beside a segment's file, if anything is."""
        with self._lock:
            self._remove_beside(file)

    def stats(self) -> list[TierStats]:
        """One entry for each size of block that files hold."""
        with self._lock:
            files, beside = list(self._files.values()), dict(self._beside)
        stats = []
        for block_nbytes in sorted({file.contents.layout.nbytes for file in files}):
            of_size = [file for file in files if file.contents.layout.nbytes == block_nbytes]
            blocks = sum(file.contents.layers * file.contents.blocks for file in of_size)
            nbytes = sum(file.nbytes + beside.get(file.path.name, 0) for file in of_size)
            stats.append(TierStats("disk", blocks, blocks, block_nbytes, nbytes, huge=False))
        return stats

    def check_integrity(self, owned: Sequence[SegmentFile]) -> None:
        """Raises IntegrityError unless `owned` are exactly the files in the folder, each of the right length, with what is kept
        beside them. Files that are being written have no owner yet, and nothing is checked once the folder is closed."""
        with self._lock:
            if self._closed:
                return
            files = dict(self._files)
            written = [path for path in self.path.glob(f"*{FILE_SUFFIX}") if path.name.lstrip(".") not in self._writing]
            written += self.path.glob(f"*{BESIDE_SUFFIX}")
            there = {path.name: path.stat().st_size for path in written}
            expected = {file.path.name: file.nbytes for file in files.values()}
            expected |= {_beside(files[name]).name: nbytes for name, nbytes in self._beside.items()}
        owners = sorted(file.path.name for file in owned)
        if owners != sorted(files):
            raise IntegrityError(f"segments own {len(owners)} files, and {len(files)} are known; expected the same, each once")
        if there != expected:
            raise IntegrityError(f"{self.path} holds {len(there)} files that are not the {len(expected)} that were written")

    def close(self) -> None:
        """Wait for files that are being written, as their blocks are read until then, and remove the folder with its files.

        Closing twice does nothing.
        """
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._writing)
        self._finalizer()

    def _remove_beside(self, file: SegmentFile) -> None:
        """`remove_beside`, with the lock held."""
        nbytes = self._beside.pop(file.path.name, None)
        if nbytes is not None:
            self._reserved -= nbytes
            _beside(file).unlink(missing_ok=True)

    def _reserve(self, nbytes: int) -> None:
        if self._bytes_max is not None and self._reserved + nbytes > self._bytes_max:
            raise CapacityError(
                f"the disk tier needs {nbytes:,} bytes more and holds {self._reserved:,} of storage.disk_bytes_max="
                f"{self._bytes_max}; drop contexts or raise the budget"
            )
        self._reserved += nbytes


def _beside(file: SegmentFile) -> Path:
    """The path of what is kept beside a segment's file."""
    return file.path.with_suffix(BESIDE_SUFFIX)


def _own_folder(path: Path) -> tuple[Path, int]:
    """A new folder below `path` and its lock file, which stays locked; clears the folders of dead processes first."""
    cleaning = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(cleaning, fcntl.LOCK_EX)  # so that nobody removes a new folder before it is locked
        for folder in path.glob(f"*{SUFFIX}"):
            _remove_dead(folder)
        own = path / f"{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        own.mkdir(mode=0o700)
        alive = os.open(own / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(alive, fcntl.LOCK_EX)
        os.write(alive, MARKER)
        return own, alive
    finally:
        os.close(cleaning)


def _remove_dead(folder: Path) -> None:
    """Clear a folder that has the marker and that no process has locked."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # not a folder of a database, or another user's
        return
    try:
        if folder.is_symlink() or os.pread(lock, len(MARKER) + 1, 0) != MARKER:
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _clear(folder)
    except OSError:  # it is in use, or cannot be cleared
        return
    finally:
        os.close(lock)


def _clear(folder: Path) -> None:
    """Remove the files that databases write, the marker last, and the folder unless it holds other files."""
    for file in (*folder.glob(f"*{FILE_SUFFIX}"), *folder.glob(f"*{BESIDE_SUFFIX}"), folder / LOCK):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _remove_own(folder: Path, alive: int, process: int) -> None:
    if os.getpid() == process:  # not in a fork, which has inherited the finalizer
        with suppress(OSError):
            _clear(folder)
        os.close(alive)
