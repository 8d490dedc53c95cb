"""The marks on segments that no catalogue names, not yet or not any more."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvdb.storage.segment_store import SegmentStore


class Marks:
    """The marks of the objects in one store. Thread-safe. stamp: what is written into a mark, None for no marks,
    where there is no catalogue."""

    def __init__(self, store: SegmentStore) -> None:
        self.stamp: Callable[[], str] | None = None
        self._store = store
        self._marked: set[str] = set()

    @contextmanager
    def forgetting(self, keys: Sequence[str]) -> Iterator[None]:
        """Mark objects that the catalogue names no more once the body has run; if it raises, it names them still."""
        for key in keys:
            if mark := self.new(key):
                self._store.mark(key, mark)
        try:
            yield
        except BaseException:
            self.remove(keys)
            raise

    def new(self, key: str) -> str:
        """The mark for an object, which it has from now on; "" for none."""
        if self.stamp is None:
            return ""
        self._marked.add(key)
        return self.stamp()

    def remove(self, keys: Iterable[str]) -> None:
        """Remove the marks of objects that the catalogue names."""
        for key in keys:
            if key in self._marked:
                self._marked.discard(key)
                self._store.mark(key, "")

    def forget(self, key: str) -> None:
        """An object is about to go."""
        self._marked.discard(key)
