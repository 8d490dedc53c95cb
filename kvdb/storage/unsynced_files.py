"""Files that were written without waiting for the disk."""

import os
from pathlib import Path

import kvdb.storage.direct_io as direct_io
from kvdb.errors import Unavailable
from kvdb.storage.home import Home


class UnsyncedFiles:
    """The files in one folder that may not have reached the disk yet. Not thread-safe: its owner locks."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._paths: set[Path] = set()
        self._error: str | None = None

    def add(self, path: Path) -> None:
        self._paths.add(path)

    def discard(self, path: Path) -> None:
        """Forget a file that goes."""
        self._paths.discard(path)

    def sync(self) -> None:
        """Wait until every file has reached the disk. Raises Unavailable, and from then on always, because what failed once may
        be lost although a second attempt succeeds."""
        try:
            if self._error is not None:
                raise Unavailable(self._error)
            for path in self._paths:
                _sync(path)
            if self._paths:
                self._home.sync()
        except Unavailable as error:
            self._error = self._error or f"{error}; nothing that is to be durable is taken until the store is opened again"
            raise
        self._paths.clear()


def _sync(path: Path) -> None:
    """Wait until a file has reached the disk. Raises Unavailable; what was not written then may be lost, and waiting again would
    not say so."""
    try:
        with direct_io.open_file(path, os.O_RDONLY, direct=False) as file:
            direct_io.sync(file)
    except OSError as error:
        raise Unavailable(f"{path} cannot be synced to the disk: {error.strerror}") from None
