"""The folder that a backup is made in: a store once it is finished, and nothing that kvdb would open before."""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvdb.errors import CapacityError, IntegrityError, InvalidArgument, Unavailable
from kvdb.storage.beside import INDEX, beside
from kvdb.storage.segment_file import SegmentFile
from kvdb.storage.segment_writing import FULL
from kvdb.storage.store_folder import CATALOG, LABEL, SEGMENTS, sync_folder


class BackupFolder:
    """A folder that becomes a copy of a store. The label, by which it is one, comes last.

    catalog: the path for the catalogue, which somebody else writes.
    """

    def __init__(self, path: Path, store: Path) -> None:
        """path: of a folder that is empty, or not there. store: the folder of the store. Raises InvalidArgument for another
        folder, and CapacityError or Unavailable where it cannot be made."""
        self._path = path.absolute()
        self._store = store
        self.catalog = self._path / CATALOG
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if any(self._path.iterdir()):
                raise InvalidArgument(f"{path} is not empty; expected a new folder for the backup")
            (self._path / SEGMENTS).mkdir(mode=0o700)
        except OSError as error:
            raise _not_written(path, error) from None
        except ValueError as error:  # a character that no path has
            raise InvalidArgument(f"{str(path)!r} is no path of a folder ({error})") from None

    def add(self, file: SegmentFile, suffixes: Iterable[str] = ()) -> None:
        """Take over the file of a segment, and those beside it whose names end so. One beside it may be gone meanwhile; one that
        is written meanwhile has a wrong checksum in the copy, and is made anew there. Raises IntegrityError, CapacityError or
        Unavailable."""
        try:
            self._copy(file.path, linked=True)
        except FileNotFoundError:
            raise IntegrityError(f"{file.path} is gone; drop the contexts over it, and check the disk") from None
        for suffix in suffixes:
            with suppress(FileNotFoundError):
                self._copy(beside(file, suffix), linked=INDEX.fullmatch(suffix) is not None)

    def _copy(self, file: Path, *, linked: bool) -> None:
        """linked: whether nobody writes it again, so that the copy may be the same file under another name."""
        copy = self._path / SEGMENTS / file.name
        try:
            if not (linked and _link(file, copy)):
                shutil.copyfile(file, copy)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _not_written(copy, error) from None

    def finish(self) -> None:
        """Wait until everything is on the disk, and make it a store. Raises CapacityError or Unavailable."""
        try:
            for path in [self.catalog, *(self._path / SEGMENTS).iterdir()]:
                _sync(path)
            sync_folder(self._path / SEGMENTS)
            unfinished = self._path / f".{LABEL}"
            shutil.copyfile(self._store / LABEL, unfinished)
            _sync(unfinished)
            unfinished.rename(self._path / LABEL)
            sync_folder(self._path)
        except OSError as error:
            raise _not_written(self._path, error) from None

    def remove(self) -> None:
        """Remove what was written, because the backup failed; the folder itself stays."""
        shutil.rmtree(self._path / SEGMENTS, ignore_errors=True)
        for path in (self.catalog, self._path / f".{LABEL}", self._path / LABEL):
            path.unlink(missing_ok=True)


def _link(file: Path, copy: Path) -> bool:
    """Give a file another name. Returns False where the file system cannot, as between two of them."""
    try:
        os.link(file, copy)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _not_written(path: Path, error: OSError) -> CapacityError | Unavailable:
    what = f"the backup {path} cannot be written: {error.strerror}"
    return CapacityError(f"{what}; free some of the disk") if error.errno in FULL else Unavailable(what)
