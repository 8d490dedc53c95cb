"""The folder of a durable database, which outlives it.

    store.json      what the folder is: {"format": "kvdb store", "version": 3, "id": 32 hex digits}
    lock            holds the number of the process that has the store open
    catalog.db      what is stored; see `kvdb.catalog.durable.catalog_file`
    segments/       the files of segments; see `kvdb.storage.segment_folder`

Only a folder that is empty, or has the store.json of a version that is known, is ever written to. A store of an older version
becomes one of this when it is opened: its catalogue in one transaction, and then its label.

Whoever has a store open has locked the folder itself, which stays locked whatever is removed from it, and the file `lock`, as
older versions do. Should another get in all the same, the catalogue tells the first one (`kvdb.catalog.durable.writer`).
"""

import errno
import fcntl
import json
import os
import secrets
import weakref
from contextlib import ExitStack
from pathlib import Path

import kvdb.forks as forks
from kvdb.errors import ForkedProcess, IntegrityError, InvalidArgument, KvdbError, Unavailable, Unsupported
from kvdb.version import __version__

FORMAT, VERSION = "kvdb store", 4
"""What the label says of a store that is written today. Older ones become so when they are opened (`StoreFolder.stamp`)."""
LABEL, LOCK, CATALOG, SEGMENTS = "store.json", "lock", "catalog.db", "segments"
NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
"""What file systems say that lock no folders."""

_left_behind: dict[tuple[int, int], int] = {}
"""Stores that were open when this process was forked, and in which process."""


def unreadable(what: str, version: object) -> Unsupported:
    """The error for a version, of a store or its catalogue, that this kvdb does not know."""
    newer = f": it is {__version__}, and a newer one wrote that, so upgrade kvdb, or restore a backup that this one wrote"
    advice = newer if isinstance(version, int) and version > VERSION else ""
    return Unsupported(f"{what} has version {version!r:.100}; this kvdb reads versions 1 to {VERSION}{advice}")


class StoreFolder:
    """The folder of one store, which this process has locked; see `kvdb.storage.home.Home`, whose path is that of the segments.

    catalog: the path of its catalogue.
    """

    setting = "storage.path"

    def __init__(self, path: Path) -> None:
        """Open the store at a path, or make one where nothing is, or an empty folder.

        Raises InvalidArgument for a folder that is no store and for what is no path, Unsupported for a store of another version,
        IntegrityError for one whose label cannot be read, Unavailable where it is open already or cannot be used, and
        ForkedProcess for one that was open when this process was forked.
        """
        path = path.absolute()  # the process may change its folder
        self._folder = path
        self.path = path / SEGMENTS
        self.catalog = path / CATALOG
        with ExitStack() as undo:
            try:
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._process, self._identity = os.getpid(), _identity(path)
                _check_is_store_or_empty(path)
                _lock(path, undo)
                self.key, self._version = _label(path)
                self.path.mkdir(exist_ok=True, mode=0o700)
                sync_folder(path)
            except KvdbError:
                raise
            except OSError as error:
                raise Unavailable(f"the store {path} cannot be used: {error.strerror}; expected a folder to write to") from None
            except ValueError as error:  # a character that no path has
                raise InvalidArgument(f"{str(path)!r} is no path of a store ({error})") from None
            self._finalizer = weakref.finalize(self, undo.pop_all().close)
            forks.in_child(self, StoreFolder._forked)

    def stamp(self) -> None:
        """Say in the label that everything in the store is of this version. Raises Unavailable."""
        if self._version != VERSION:
            try:
                _write_label(self._folder, self.key)
                sync_folder(self._folder)
            except OSError as error:
                raise Unavailable(f"the label of {self._folder} cannot be written: {error.strerror}") from None
            self._version = VERSION

    def sync(self) -> None:
        """Wait until the names of all files are on the disk. Raises Unavailable."""
        try:
            sync_folder(self.path)
        except OSError as error:
            raise Unavailable(f"{self.path} cannot be synced to the disk: {error.strerror}") from None

    def close(self) -> None:
        """Unlock the store. Everything in it stays."""
        self._finalizer()

    def _forked(self) -> None:
        """Leave the lock to the parent, with whose end it ends then."""
        if self._finalizer.alive:
            _left_behind[self._identity] = self._process
            self._finalizer()


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode of a folder. Raises ForkedProcess for a store that a parent had open at the fork, for SQLite takes what it
    kept of the catalogue's file for its own."""
    found = path.stat()
    identity = found.st_dev, found.st_ino
    if identity in _left_behind:
        raise ForkedProcess(
            f"the store {path} was open in process {_left_behind[identity]} when that was forked into this one, {os.getpid()}; "
            "open it in a process that was started otherwise (multiprocessing's spawn), or that was forked before"
        )
    return identity


def sync_folder(path: Path) -> None:
    """Wait until the names of a folder's files are on the disk. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _check_is_store_or_empty(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()}
    if LABEL not in names and names - {LOCK, f".{LABEL}"}:  # these two are what making a store leaves if it is killed
        raise InvalidArgument(f"{path} is no kvdb store, and not empty: it lacks {LABEL}; expected a store, or a new folder")


def _lock(path: Path, undo: ExitStack) -> None:
    """Lock the folder and the lock file in it. undo: unlocks them. Raises Unavailable where another has locked one."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    undo.callback(os.close, folder)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _open_already(path) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    undo.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _open_already(path) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _open_already(path: Path) -> Unavailable:
    try:
        holder = (path / LOCK).read_text("ascii", "replace")[:20].strip()
    except OSError:  # somebody removed it
        holder = ""
    if holder == str(os.getpid()):
        return Unavailable(
            f"the store {path} is open already, in this very process; use that database, from any thread, or close it first, "
            "with db.close() or at the end of `with kvdb.connect(...) as db`"
        )
    return Unavailable(f"the store {path} is open already, in process {holder or 'unknown'}; close it there first")


def _write_label(path: Path, key: str) -> None:
    """Write the label of a store under another name, and rename it. Raises OSError."""
    unfinished = path / f".{LABEL}"
    fields = {"format": FORMAT, "version": VERSION, "id": key}
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump(fields, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path / LABEL)


def _label(path: Path) -> tuple[str, int]:
    """The id and the version of the store, whose label is made if there is none."""
    label = path / LABEL
    if not label.exists():
        _write_label(path, secrets.token_hex(16))
    try:
        fields = json.loads(label.read_bytes())
        found, version, key = fields["format"], fields["version"], fields["id"]
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{label} cannot be read ({error!r:.100}); nothing of the store was touched") from None
    if found != FORMAT or not isinstance(key, str):
        raise InvalidArgument(f"{path} is no kvdb store: its {LABEL} says {found!r:.100}")
    if version not in range(1, VERSION + 1):
        raise unreadable(f"the store {path}", version)
    return key, version
