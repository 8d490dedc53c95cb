"""The files in a store of segments that its catalogue does not know."""

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Lock

from kvdb.errors import Unavailable
from kvdb.storage.beside import SEGMENT, final_name, segment_of
from kvdb.storage.segment_store import SegmentStore
from kvdb.types import UnknownFile

log = logging.getLogger(__name__)


class UnknownFiles:
    """The objects that were there, and of no segment, when the store was opened. Thread-safe."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._sizes: dict[str, int] = {}
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def names(self) -> set[str]:
        """The keys that they have, or would have had once they were written."""
        return set(map(final_name, self._sizes))

    def find(self, known: Collection[str], is_nobodys: Callable[[str, str], bool] | None) -> None:
        """Look for them, and tell of those that stay. Nothing else may be going on. known: the keys of all others. is_nobodys:
        whether a segment with that key and that mark is a leftover, which goes; None where nothing is known to be. Raises
        Unavailable where the store cannot be read."""
        sizes = {key: nbytes for key, nbytes in self._store.list().items() if key not in known}
        self._sizes = sizes if is_nobodys is None else self._without_leftovers(sizes, known, is_nobodys)
        if self._sizes:
            log.warning(
                "%s holds %d files, %d bytes, that the catalogue does not know, such as %s; they stay: if the catalogue is older "
                "than they are, put the newer one back, else kvdb gc removes them",
                *(self._store.where, len(self._sizes), self.nbytes, min(self._sizes)),
            )

    def all(self) -> list[UnknownFile]:
        """Those that are there still."""
        with self._lock:
            return [UnknownFile(name, nbytes) for name, nbytes in sorted(self._sizes.items())]

    def remove(self) -> list[UnknownFile]:
        """Remove them. Returns them. Raises Unavailable where one cannot be removed."""
        removed = self.all()
        for file in removed:
            self._store.remove(file.name)
            with self._lock:
                self._sizes.pop(file.name, None)
        return removed

    def _without_leftovers(
        self, sizes: dict[str, int], known: Collection[str], is_nobodys: Callable[[str, str], bool]
    ) -> dict[str, int]:
        """Remove the leftovers: what was never finished, which no catalogue names, segments that are nobody's, and what is kept
        beside none. Returns the others."""
        finished = [key for key in sizes if key == final_name(key)]
        segments = {key for key in finished if key.endswith(SEGMENT) and not is_nobodys(key, self._store.marked(key))}
        stay = [key for key in finished if segment_of(key) in {*segments, *known}]
        for key in set(sizes).difference(stay):
            with suppress(Unavailable):  # it is tried again when the store is opened again
                self._store.remove(key)
        return {key: sizes[key] for key in stay}
