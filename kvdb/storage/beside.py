"""The files beside those of segments: evidence, statistics, scores, indexes. Each is named as its segment, with another end."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvdb.errors import Unavailable
from kvdb.storage.segment_file import SegmentFile

INDEX = re.compile(r"\.([A-Za-z0-9_-]+)\.([0-9]+)\.index")
"""The end of the name of an index's file: the kind, and the number of the layer."""
NAME = re.compile(rf"\.?([0-9]+)(\.segment|\.evidence|\.statistics|\.scores|{INDEX.pattern.replace('(', '(?:')})(\..*)?")
"""The name of a segment's file, or of one beside it; while it is written, with a dot before it and perhaps more behind it."""


class BesideFiles:
    """The files beside those of segments in one folder, and their bytes. Not thread-safe: its owner locks."""

    def __init__(self, folder: Path) -> None:
        """folder: may hold such files already, of segments that will be adopted. Raises Unavailable where it cannot be read."""
        self._found = _found(folder)
        self._sizes: dict[SegmentFile, dict[str, int]] = {}

    @property
    def next_number(self) -> int:
        """The least number that is above those of all segments whose files were there."""
        return max((int(number) + 1 for number in self._found), default=0)

    def adopt(self, file: SegmentFile) -> int:
        """Take over what lies beside a file that was there. Returns its bytes."""
        self._sizes[file] = self._found.pop(file.path.stem, {})
        return self.nbytes(file)

    def put(self, file: SegmentFile, suffix: str, nbytes: int) -> None:
        """Count a file that was written. suffix: the end of its name."""
        self._sizes.setdefault(file, {})[suffix] = nbytes

    def remove(self, file: SegmentFile, suffix: str) -> int:
        """Remove a file, if it is there. Returns the bytes that it had."""
        sizes = self._sizes.get(file, {})
        if suffix not in sizes:
            return 0
        with suppress(OSError):  # it is dropped when it is read, if it is not there as it was written
            beside(file, suffix).unlink(missing_ok=True)
        return sizes.pop(suffix)

    def remove_all(self, file: SegmentFile) -> int:
        """Remove everything beside a segment's file. Returns the bytes."""
        nbytes = sum(self.remove(file, suffix) for suffix in self.suffixes(file))
        self._sizes.pop(file, None)
        return nbytes

    def suffixes(self, file: SegmentFile) -> tuple[str, ...]:
        """The ends of the names of what is kept beside a segment's file."""
        return tuple(self._sizes.get(file, ()))

    def nbytes(self, file: SegmentFile) -> int:
        return sum(self._sizes.get(file, {}).values())

    def by_name(self) -> dict[str, int]:
        """The bytes of every file, by its name."""
        return {beside(file, suffix).name: size for file, sizes in self._sizes.items() for suffix, size in sizes.items()}

    def indexes(self) -> list[tuple[SegmentFile, str, int]]:
        """The files of indexes: that of the segment, the end of the name, the bytes."""
        kept = [(file, suffix, size) for file, sizes in self._sizes.items() for suffix, size in sizes.items()]
        return [one for one in kept if INDEX.fullmatch(one[1])]


def beside(file: SegmentFile, suffix: str) -> Path:
    """The path of what is kept beside a segment's file under that end of its name."""
    return file.path.with_suffix(suffix)


def final_name(name: str) -> str:
    """The name that a file has once it is written."""
    matched = NAME.fullmatch(name)
    return name if matched is None else matched[1] + matched[2]


def written(folder: Path) -> Iterator[Path]:
    """The files in a folder that are named as those of segments and beside them are, finished or not."""
    return (path for path in folder.iterdir() if NAME.fullmatch(path.name))


def _found(folder: Path) -> dict[str, dict[str, int]]:
    """The bytes of what lies beside the files of segments, by the segments' numbers and the ends of the names."""
    found: dict[str, dict[str, int]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                matched = NAME.fullmatch(entry.name)
                if matched is not None and entry.name == final_name(entry.name):
                    sizes = found.setdefault(matched[1], {})
                    if matched[2] != ".segment":
                        sizes[matched[2]] = entry.stat(follow_symlinks=False).st_size
    except OSError as error:
        raise Unavailable(f"{folder} cannot be read: {error.strerror}") from None
    return found
