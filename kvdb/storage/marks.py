"""The mark on a segment's file that no catalogue names, not yet or not any more: an extended attribute of the file. A file system
that has none leaves files unmarked, as copying them does."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "user.kvdb.unnamed"


class Marks:
    """The marks of the files in one folder. Thread-safe. stamp: what is written into a mark, None for no marks,
    where there is no catalogue."""

    def __init__(self, folder: Path) -> None:
        self.stamp: Callable[[], str] | None = None
        self._folder = folder
        self._marked: set[str] = set()

    @contextmanager
    def forgetting(self, names: Sequence[str]) -> Iterator[None]:
        """Mark files that the catalogue names no more once the body has run; if it raises, it names them still."""
        for name in names:
            self.put_on(name, self._folder / name)
        try:
            yield
        except BaseException:
            self.remove(names)
            raise

    def put_on(self, name: str, path: Path) -> None:
        """Mark a file that is at that path now, and is to have the name."""
        if self.stamp is not None:
            self._marked.add(name)
            with suppress(OSError, AttributeError):  # only Linux has them
                os.setxattr(path, NAME, self.stamp().encode())

    def remove(self, names: Iterable[str]) -> None:
        """Remove the marks of files that the catalogue names."""
        for name in names:
            if name in self._marked:
                self._marked.discard(name)
                with suppress(OSError, AttributeError):
                    os.removexattr(self._folder / name, NAME)

    def forget(self, name: str) -> None:
        """A file is about to go."""
        self._marked.discard(name)


def read(path: Path) -> str:
    """What is written into a file's mark, "" for none."""
    with suppress(OSError, AttributeError):
        return os.getxattr(path, NAME).decode("ascii", "replace")
    return ""
