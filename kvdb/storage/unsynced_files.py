"""The files of segments that were written without waiting for the disk."""

from kvdb.errors import Unavailable
from kvdb.storage.home import Home
from kvdb.storage.segment_file import SegmentFile


class UnsyncedFiles:
    """The files in one folder that may not have reached the disk yet. Not thread-safe: its owner locks."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._files: set[SegmentFile] = set()
        self._error: str | None = None

    def add(self, file: SegmentFile) -> None:
        self._files.add(file)

    def discard(self, file: SegmentFile) -> None:
        """Forget a file that goes."""
        self._files.discard(file)

    def sync(self) -> None:
        """Wait until every file has reached the disk. Raises Unavailable, and from then on always, because what failed once may
        be lost although a second attempt succeeds."""
        try:
            if self._error is not None:
                raise Unavailable(self._error)
            for file in self._files:
                file.sync()
            if self._files:
                self._home.sync()
        except Unavailable as error:
            self._error = self._error or f"{error}; nothing that is to be durable is taken until the store is opened again"
            raise
        self._files.clear()
