"""The keys of segments, and of what is kept beside each: evidence, statistics, scores, states, indexes. These have its number,
and another end."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kvdb.errors import Unavailable
from kvdb.storage.segment_store import SegmentStore

SEGMENT = ".segment"
"""The end of a segment's key."""
INDEX = re.compile(r"\.([A-Za-z0-9_-]+)\.([0-9]+)\.index")
"""The end of an index's key: the kind, and the number of the layer."""
NAME = re.compile(
    rf"\.?([0-9]+)(\.segment|\.evidence|\.statistics|\.scores|\.[0-9]+\.states|{INDEX.pattern.replace('(', '(?:')})(\..*)?"
)
"""The key of a segment, or of what is kept beside one; while it is written, with a dot before it and perhaps more behind it."""


class BesideSegments:
    """What is kept beside the segments of one store, and its bytes. Not thread-safe: its owner locks."""

    def __init__(self, store: SegmentStore) -> None:
        """store: may hold such objects already, of segments that will be adopted. Raises Unavailable where it cannot be read."""
        self._store = store
        self._found = _found(store.list())
        self._sizes: dict[str, dict[str, int]] = {}

    @property
    def next_number(self) -> int:
        """The least number that is above those of all segments that were there."""
        return max((int(number) + 1 for number in self._found), default=0)

    def adopt(self, segment: str) -> int:
        """Take over what is kept beside a segment that was there. Returns its bytes."""
        self._sizes[segment] = self._found.pop(segment.removesuffix(SEGMENT), {})
        return self.nbytes(segment)

    def put(self, segment: str, suffix: str, nbytes: int) -> None:
        """Count an object that was written. suffix: the end of its key."""
        self._sizes.setdefault(segment, {})[suffix] = nbytes

    def remove(self, segment: str, suffix: str) -> int:
        """Remove an object, if it is there. Returns the bytes that it had."""
        sizes = self._sizes.get(segment, {})
        if suffix not in sizes:
            return 0
        with suppress(Unavailable):  # it is dropped when it is read, if it is not there as it was written
            self._store.remove(beside(segment, suffix))
        return sizes.pop(suffix)

    def remove_all(self, segment: str) -> int:
        """Remove everything beside a segment. Returns the bytes."""
        nbytes = sum(self.remove(segment, suffix) for suffix in self.suffixes(segment))
        self._sizes.pop(segment, None)
        return nbytes

    def suffixes(self, segment: str) -> tuple[str, ...]:
        """The ends of the keys of what is kept beside a segment."""
        return tuple(self._sizes.get(segment, ()))

    def nbytes(self, segment: str) -> int:
        return sum(self._sizes.get(segment, {}).values())

    def by_key(self) -> dict[str, int]:
        """The bytes of every object, by its key."""
        return {beside(segment, suffix): size for segment, suffix, size in self._all()}

    def indexes(self) -> list[tuple[str, str, int]]:
        """The indexes: the key of the segment, the end of their own, the bytes."""
        return [one for one in self._all() if INDEX.fullmatch(one[1])]

    def _all(self) -> list[tuple[str, str, int]]:
        return [(segment, suffix, size) for segment, sizes in self._sizes.items() for suffix, size in sizes.items()]


def beside(segment: str, suffix: str) -> str:
    """The key of what is kept beside the segment with that key, under that end."""
    return segment.removesuffix(SEGMENT) + suffix


def segment_of(key: str) -> str:
    """The key of the segment that an object is, or is kept beside."""
    matched = NAME.fullmatch(key)
    assert matched is not None
    return matched[1] + SEGMENT


def final_name(name: str) -> str:
    """The name that a file has once it is written."""
    matched = NAME.fullmatch(name)
    return name if matched is None else matched[1] + matched[2]


def written(folder: Path) -> Iterator[Path]:
    """The files in a folder that are named as those of segments and beside them are, finished or not."""
    return (path for path in folder.iterdir() if NAME.fullmatch(path.name))


def _found(listed: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The bytes of what is kept beside segments, by the segments' numbers and the ends of the keys."""
    found: dict[str, dict[str, int]] = {}
    for key, nbytes in listed.items():
        matched = NAME.fullmatch(key)
        if matched is not None and key == final_name(key):
            sizes = found.setdefault(matched[1], {})
            if matched[2] != SEGMENT:
                sizes[matched[2]] = nbytes
    return found
