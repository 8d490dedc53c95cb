"""The files in a store's folder of segments that its catalogue does not know."""

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from threading import Lock

import kvdb.storage.marks as marks
from kvdb.errors import Unavailable
from kvdb.storage.beside import NAME, final_name, written
from kvdb.types import UnknownFile

log = logging.getLogger(__name__)


class UnknownFiles:
    """The files that were there, and of no segment, when the store was opened. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def names(self) -> set[str]:
        """The names that they have, or would have had once they were written."""
        return set(map(final_name, self._sizes))

    def find(self, known: Collection[str], is_nobodys: Callable[[str, str], bool] | None) -> None:
        """Look for them, and tell of those that stay. Nothing else may be going on. known: the names of all others. is_nobodys:
        whether a segment's file of that name and with that mark is a leftover, which goes; None where nothing is known to be."""
        paths = [path for path in written(self._folder) if path.name not in known]
        for path in paths if is_nobodys is None else _without_leftovers(paths, known, is_nobodys):
            with suppress(OSError):  # somebody else removed it
                self._sizes[path.name] = path.stat().st_size
        if self._sizes:
            log.warning(
                "%s holds %d files, %d bytes, that the catalogue does not know, such as %s; they stay: if the catalogue is older "
                "than they are, put the newer one back, else kvdb gc removes them",
                *(self._folder, len(self._sizes), self.nbytes, min(self._sizes)),
            )

    def all(self) -> list[UnknownFile]:
        """Those that are there still."""
        with self._lock:
            return [UnknownFile(name, nbytes) for name, nbytes in sorted(self._sizes.items())]

    def remove(self) -> list[UnknownFile]:
        """Remove them. Returns them. Raises Unavailable where one cannot be removed."""
        removed = self.all()
        for file in removed:
            path = self._folder / file.name
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise Unavailable(f"{path} cannot be removed: {error.strerror}") from None
            with self._lock:
                self._sizes.pop(file.name, None)
        return removed


def _without_leftovers(paths: list[Path], known: Collection[str], is_nobodys: Callable[[str, str], bool]) -> list[Path]:
    """Remove the leftovers among files: those that were never finished, which no catalogue names, those of segments that are
    nobody's, and what lies beside no segment. Returns the others."""
    finished = [path for path in paths if path.name == final_name(path.name)]
    segments = {path.name for path in finished if path.suffix == ".segment" and not is_nobodys(path.name, marks.read(path))}
    stay = [path for path in finished if _segment_of(path) in {*segments, *known}]
    for path in set(paths).difference(stay):
        with suppress(OSError):  # it is tried again when the store is opened again
            path.unlink(missing_ok=True)
    return stay


def _segment_of(path: Path) -> str:
    """The name of the segment's file that a file is, or lies beside."""
    matched = NAME.fullmatch(path.name)
    assert matched is not None
    return f"{matched[1]}.segment"
