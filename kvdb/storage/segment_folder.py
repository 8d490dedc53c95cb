"""The store of one machine: a file in a folder for each object.

A file is written under another name, synced and renamed, so that a file of its own name is always whole. One that is to outlive
the process alone, and not the loss of power, is not synced. It is read and written past the page cache (O_DIRECT) where that is
all in whole pages: what is offloaded then takes no memory as cache. Native code reads pages of it by itself.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

import kvdb.storage.direct_io as direct_io
from kvdb.errors import AlreadyExists, CapacityError, Unavailable
from kvdb.storage.beside import written
from kvdb.storage.home import Home
from kvdb.storage.segment_store import SegmentStore, missing, unreadable
from kvdb.storage.unsynced_files import UnsyncedFiles
from kvdb.types import Addresses

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MARK = "user.kvdb.unnamed"
"""The extended attribute of a file that is its mark. A file system that has none leaves files unmarked, as copying them does."""


class SegmentFolder(SegmentStore):
    """The files in the folder of one database; see `SegmentStore`. path: of the folder."""

    def __init__(self, home: Home) -> None:
        """home: is closed with this store."""
        self.id = home.key
        self.path = home.path
        self.where = str(home.path)
        self._home = home
        self._unsynced = UnsyncedFiles(home)
        self._lock = Lock()

    def begin(self, key: str, nbytes: int, *, whole_pages: bool) -> "FileWriter":
        if self._path(key).exists() or self._path(f".{key}").exists():
            raise AlreadyExists(f"{self._path(key)} is there already, and is never written over")
        return FileWriter(self, key, nbytes, whole_pages=whole_pages)

    @contextmanager
    def open(self, key: str, *, whole_pages: bool) -> "Iterator[FileReader]":
        reader = FileReader(f"{self.where}/{key}", whole_pages=whole_pages)
        try:
            yield reader
        finally:
            reader.close()

    def put(self, key: str, content: bytes) -> None:
        with self.saving(key) as path:
            path.write_bytes(content)

    def get(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"{self._path(key)} cannot be read: {error.strerror}") from None

    def remove(self, key: str) -> None:
        with self._lock:
            self._unsynced.discard(self._path(key))
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            raise Unavailable(f"{self._path(key)} cannot be removed: {error.strerror}") from None

    def list(self) -> dict[str, int]:
        found = {}
        try:
            for path in written(self.path):
                with suppress(FileNotFoundError):  # somebody removed it meanwhile
                    found[path.name] = path.stat(follow_symlinks=False).st_size
        except OSError as error:
            raise Unavailable(f"{self.path} cannot be read: {error.strerror}") from None
        return found

    def sync(self) -> None:
        with self._lock:
            self._unsynced.sync()

    def close(self) -> None:
        self._home.close()

    def mark(self, key: str, text: str) -> None:
        with suppress(OSError, AttributeError):  # only Linux has them
            if text:
                os.setxattr(self._path(key), MARK, text.encode())
            else:
                os.removexattr(self._path(key), MARK)

    def marked(self, key: str) -> str:
        with suppress(OSError, AttributeError):
            return os.getxattr(self._path(key), MARK).decode("ascii", "replace")
        return ""

    def file(self, key: str) -> Path:
        return self._path(key)

    @contextmanager
    def local(self, key: str) -> Iterator[Path]:
        try:
            yield self._path(key)
        except FileNotFoundError:
            raise missing(self.where, key) from None
        except OSError as error:
            raise Unavailable(f"{self._path(key)} cannot be read: {error.strerror}") from None

    @contextmanager
    def saving(self, key: str) -> Iterator[Path]:
        path, kept = self._path(key), False
        try:
            yield path
            kept = True
        except OSError as error:
            full = CapacityError if error.errno in FULL else Unavailable
            raise full(f"{path} cannot be written: {error.strerror}") from None
        finally:
            if not kept:
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def finished(self, unfinished: Path, path: Path, *, synced: bool) -> None:
        """Give a file its name. synced: wait until that is on the disk. Raises OSError or Unavailable; then there is no file."""
        os.rename(unfinished, path)
        if not synced:
            with self._lock:
                self._unsynced.add(path)
            return
        try:
            self._home.sync()
        except Unavailable:
            path.unlink(missing_ok=True)
            raise

    def failed(self, nbytes: int, error: OSError) -> CapacityError | Unavailable:
        """The error for a segment of so many bytes that could not be written."""
        kept = "everything stays in main memory"
        if error.errno in FULL:
            return CapacityError(
                f"{self.path} has no room for a segment of {nbytes:,} bytes: {error.strerror}, with "
                f"{shutil.disk_usage(self.path).free:,} bytes free on its file system; {kept}, so free some of that disk, drop "
                f"contexts, or let {self._home.setting} be on another"
            )
        advice = f"{kept}, so make the folder of {self._home.setting} a writable one"
        return Unavailable(f"{self.path} cannot be written to: {error.strerror}; {advice}")

    def _path(self, key: str) -> Path:
        return self.path / key


class FileReader:
    """A file that is open to be read; see `ObjectReader`."""

    def __init__(self, path: str, *, whole_pages: bool) -> None:
        """Raises Unavailable."""
        self._path = path
        try:
            self._file = direct_io.opened(path, os.O_RDONLY, direct=whole_pages)
            self.nbytes = os.fstat(self._file).st_size
        except OSError as error:
            raise unreadable(path, str(error.strerror)) from None

    def read(self, at: int, addresses: Addresses, nbytes: int) -> int:
        try:
            return direct_io.read(self._file, at, addresses, nbytes)
        except OSError as error:
            raise unreadable(self._path, str(error.strerror)) from None

    def read_bytes(self, at: int, nbytes: int) -> bytes:
        try:
            return os.pread(self._file, nbytes, at)
        except OSError as error:
            raise unreadable(self._path, str(error.strerror)) from None

    def close(self) -> None:
        os.close(self._file)


class FileWriter:
    """A file that is being written; see `ObjectWriter`."""

    def __init__(self, folder: SegmentFolder, key: str, nbytes: int, *, whole_pages: bool) -> None:
        """Raises what `SegmentStore.begin` does; then there is no file."""
        self._folder = folder
        self._path = folder.path / key
        self._unfinished = folder.path / f".{key}"
        self._nbytes = nbytes
        self._file = -1
        try:
            self._file = direct_io.opened(self._unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct=whole_pages)
            direct_io.reserve(self._file, nbytes)
        except FileExistsError:
            raise AlreadyExists(f"{self._unfinished} is there already, and is never written over") from None
        except OSError as error:
            self.abandon()
            raise folder.failed(nbytes, error) from None

    def write(self, at: int, addresses: Addresses, nbytes: int) -> None:
        try:
            direct_io.write(self._file, at, addresses, nbytes)
        except OSError as error:
            raise self._folder.failed(self._nbytes, error) from None

    def finish(self, mark: str, *, synced: bool) -> None:
        try:
            if mark:
                self._folder.mark(self._unfinished.name, mark)
            if synced:
                direct_io.sync(self._file)
            self._folder.finished(self._unfinished, self._path, synced=synced)
        except OSError as error:
            raise self._folder.failed(self._nbytes, error) from None

    def abandon(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        with suppress(OSError):
            self._unfinished.unlink(missing_ok=True)
