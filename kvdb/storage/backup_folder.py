"""The folder that a backup is made in: a store once it is finished, and nothing that kvdb would open before.

A file is copied, so that nothing that happens to the store happens to the backup. Where the file system has reflinks, the copy
shares the store's blocks on the disk until either is written to. Hard links are made for who asks for them: the file is the
store's own then, under a second name.
"""

import errno
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import kvdb.storage.direct_io as direct_io
from kvdb.errors import CapacityError, IntegrityError, InvalidArgument, NotFound, Unavailable
from kvdb.storage.beside import INDEX, beside
from kvdb.storage.segment_folder import FULL, SegmentFolder
from kvdb.storage.segment_store import SegmentStore
from kvdb.storage.store_folder import CATALOG, LABEL, SEGMENTS, sync_folder
from kvdb.types import BackedUp

FICLONE = 0x40049409
"""The number of Linux's request to share the blocks of another file."""
NO_CLONES = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM}


class BackupFolder:
    """A folder that becomes a copy of a store. The label, by which it is one, comes last.

    catalog: the path for the catalogue, which somebody else writes. segments: the copies, to be read. The rest: see
    `kvdb.storage.home.Home`.
    """

    key = "backup"
    setting = "the backup"

    def __init__(self, path: Path, store: Path, *, link: bool = False) -> None:
        """path: of a folder that is empty, or not there. store: the folder of the store. link: make hard links. Raises
        InvalidArgument for another folder, and CapacityError or Unavailable where it cannot be made."""
        self._path = path.absolute()
        self._store = store
        self._link = link
        self._made: Counter[str] = Counter()
        self.catalog = self._path / CATALOG
        self.path = self._path / SEGMENTS
        self.segments = SegmentFolder(self)
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if any(self._path.iterdir()):
                raise InvalidArgument(f"{path} is not empty; expected a new folder for the backup")
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise _not_written(path, error) from None
        except ValueError as error:  # a character that no path has
            raise InvalidArgument(f"{str(path)!r} is no path of a folder ({error})") from None

    def add(self, store: SegmentStore, segment: str, suffixes: Iterable[str] = ()) -> None:
        """Copy the segment with that key out of a store, and what is beside it under those ends of its key. Of that something may
        be gone meanwhile, or be written meanwhile. Raises IntegrityError, CapacityError or Unavailable."""
        try:
            self._copy(store, segment, fixed=True)
        except NotFound:
            raise IntegrityError(f"{store.where}/{segment} is gone; drop the contexts over it, and check the disk") from None
        for suffix in suffixes:
            with suppress(NotFound):
                self._copy(store, beside(segment, suffix), fixed=INDEX.fullmatch(suffix) is not None)

    def _copy(self, store: SegmentStore, key: str, *, fixed: bool) -> None:
        """fixed: whether nobody writes it again, so that the copy may be the same file under another name. Raises NotFound
        too."""
        with store.local(key) as file:
            self._copy_file(file, self.path / key, fixed=fixed)

    def _copy_file(self, file: Path, copy: Path, *, fixed: bool) -> None:
        """`_copy`, which raises FileNotFoundError where the file is not there."""
        try:
            if self._link and fixed:
                os.link(file, copy)
                self._made["linked"] += 1
            elif _reflink(file, copy):
                self._made["reflinked"] += 1
            else:
                shutil.copyfile(file, copy)
                self._made["copied"] += 1
        except FileNotFoundError:
            raise
        except OSError as error:
            if self._link and error.errno in NO_CLONES:
                raise InvalidArgument(f"{copy} cannot be a hard link to {file}: {error.strerror}; leave that out") from None
            raise _not_written(copy, error) from None

    def sync(self) -> None:
        """Wait until everything is on the disk. Raises CapacityError or Unavailable."""
        try:
            for path in [self.catalog, *self.path.iterdir()]:
                _sync(path)
            sync_folder(self.path)
        except OSError as error:
            raise _not_written(self._path, error) from None

    def finish(self, contexts: int) -> BackedUp:
        """Make what is on the disk a store of so many contexts. Raises CapacityError or Unavailable."""
        try:
            unfinished = self._path / f".{LABEL}"
            shutil.copyfile(self._store / LABEL, unfinished)
            _sync(unfinished)
            unfinished.rename(self._path / LABEL)
            sync_folder(self._path)
            files = [self._path / LABEL, self.catalog, *self.path.iterdir()]
            nbytes = sum(path.stat().st_size for path in files)
            same = self._path.stat().st_dev == self._store.stat().st_dev
        except OSError as error:
            raise _not_written(self._path, error) from None
        copied = self._made["copied"] + 2  # the catalogue and the label
        return BackedUp(contexts, copied, self._made["reflinked"], self._made["linked"], nbytes, same)

    def close(self) -> None:
        """Nothing is held."""

    def remove(self) -> None:
        """Remove what was written, because the backup failed; the folder itself stays."""
        shutil.rmtree(self.path, ignore_errors=True)
        for path in (self.catalog, self._path / f".{LABEL}", self._path / LABEL):
            path.unlink(missing_ok=True)


def _reflink(file: Path, copy: Path) -> bool:
    """Make a copy that shares the blocks of a file on the disk. Returns False, and there is none, where the file system has no
    such copies, as between two of them. Raises OSError."""
    with (
        direct_io.open_file(file, os.O_RDONLY, direct=False) as source,
        direct_io.open_file(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, direct=False) as target,
    ):
        try:
            fcntl.ioctl(target, FICLONE, source)
        except OSError as error:
            if error.errno not in NO_CLONES:
                raise
            copy.unlink()
            return False
    return True


def _sync(path: Path) -> None:
    """Wait until a file is on the disk, from where it is read again. Raises OSError."""
    with direct_io.open_file(path, os.O_RDONLY, direct=False) as file:
        direct_io.sync(file)


def _not_written(path: Path, error: OSError) -> CapacityError | Unavailable:
    what = f"the backup {path} cannot be written: {error.strerror}"
    return CapacityError(f"{what}; free some of the disk") if error.errno in FULL else Unavailable(what)
