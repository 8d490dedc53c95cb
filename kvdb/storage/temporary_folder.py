"""The folder of a database that keeps nothing: it holds what was offloaded, and is removed with the database."""

import fcntl
import os
import secrets
import weakref
from contextlib import suppress
from pathlib import Path

import kvdb.forks as forks
from kvdb.errors import Unavailable
from kvdb.storage.beside import written

LOCK = "lock"
MARKER = b"kvdb: segments of one database, removed when it ends\n"
"""The contents of the lock file in a database's folder. A folder without it is somebody else's and never touched."""
SUFFIX = ".segments"
"""The end of the names of databases' folders below storage.disk_path."""


class TemporaryFolder:
    """A new folder below a path that databases may share; see `kvdb.storage.home.Home`.

    It has a file with MARKER that is locked as long as its process lives. The files of dead processes are removed from folders
    with that marker; nothing else below the path is touched.
    """

    setting = "storage.disk_path"

    def __init__(self, path: Path) -> None:
        """Raises Unavailable for a path at which no folder can be made or written to."""
        path = path.absolute()  # the process may change its folder
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.path, alive = _own_folder(path)
        except OSError as error:
            raise Unavailable(
                f"storage.disk_path {path} cannot be used: {error.strerror}; expected a folder that can be written to"
            ) from None
        self.key = self.path.name
        self._finalizer = weakref.finalize(self, _remove_own, self.path, alive, os.getpid())
        forks.in_child(self, TemporaryFolder.close)

    def sync(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Remove the folder with its files; in the child of a fork, leave it to the parent, with whose end its lock ends."""
        self._finalizer()


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
    for file in (*written(folder), folder / LOCK):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _remove_own(folder: Path, alive: int, process: int) -> None:
    if os.getpid() == process:
        with suppress(OSError):
            _clear(folder)
    os.close(alive)
