"""The protocol of a store: where segments are kept, and everything that whoever writes another one has to promise.

A store holds objects under keys, and moves bytes between them and memory. It knows of no blocks, checksums, budgets or contexts:

- `kvdb.storage.disk.DiskTier` chooses keys, counts bytes, and says what goes. Keys have the form of `kvdb.storage.beside.NAME`.
- `kvdb.storage.segment_writing.SegmentWriting` and `kvdb.storage.stored_segment.StoredSegment` know what stands where in an
  object, and compare the checksum of everything that they read. What is kept beside segments has checksums of its own. So an
  object that was damaged is found whatever the store is, and a store need not look for it.

What every store promises:

- **An object is whole or not there.** What `begin` began is under its key only once `finish` has returned. Whoever is killed
  before that leaves nothing under it, whenever that is.
- **A finished object never changes.** It is written once, under a key that nothing else has. What is kept by `put` and `saving`
  is the exception: whole values, which are replaced.
- **Reads take any range, many at once.** Several threads use one reader, and many readers are open at a time.
- **Errors are these.** CapacityError where there is no room, Unavailable for everything else that fails; the message says where,
  and what to do. Nothing is there afterwards that was not before. A store that checks its objects itself may raise
  IntegrityError where it finds one damaged.
- **A key that is not there** is Unavailable to who opens it, None to who gets it, NotFound to who wants it as a file, and nothing
  at all to who removes it.

All methods are thread-safe. `kvdb.storage.segment_folder` is a folder of files, `kvdb.storage.memory_store` the shortest to read,
and `tests/kvdb/storage/test_segment_stores.py` runs what stands here on every store of its list.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from kvdb.errors import NotFound, Unavailable
from kvdb.types import Addresses


class ObjectReader(Protocol):
    """An object that is open to be read, by several threads at once."""

    @property
    def nbytes(self) -> int:
        """The bytes of the whole object."""
        ...

    def read(self, at: int, addresses: Addresses, nbytes: int) -> int:
        """Fill blocks of `nbytes` bytes at these addresses, uint64 `[n]`, from the object's bytes [at, at + n * nbytes): straight
        into them, and without the GIL where that takes time. Returns the bytes read, fewer only where the object ends. Raises
        Unavailable; then what stands in the blocks is unspecified."""
        ...

    def read_bytes(self, at: int, nbytes: int) -> bytes:
        """Few bytes, [at, at + nbytes) of the object, fewer only where it ends. Raises Unavailable."""
        ...


class ObjectWriter(Protocol):
    """An object that is being written, until `finish` or `abandon`."""

    def write(self, at: int, addresses: Addresses, nbytes: int) -> None:
        """Write blocks of `nbytes` bytes at these addresses, uint64 `[n]`, to the object's bytes [at, at + n * nbytes).

        Several threads call it at once, in any order of ranges, each byte once; what none wrote is zero. The blocks are read
        until it returns, and no longer. Raises CapacityError or Unavailable.
        """
        ...

    def finish(self, mark: str, *, synced: bool) -> None:
        """Put the object under its key, with a mark, "" for none (see `SegmentStore.mark`). No write is under way. synced: return
        once no loss of power undoes it; otherwise `SegmentStore.sync` waits for that. Raises CapacityError or Unavailable; then
        it is not there, and `abandon` gives up what is left."""
        ...

    def abandon(self) -> None:
        """Give the object up, if it is not finished. No write is under way. It raises nothing, and may be called again."""
        ...


class SegmentStore(Protocol):
    """Objects under keys. The methods that have a body are right for every store; one that can do better has its own.

    id: names it among all stores there are, and stays; it is in every segment, so that none is taken for one of another store.
    where: names it in messages.
    """

    id: str
    where: str

    def begin(self, key: str, nbytes: int, *, whole_pages: bool) -> ObjectWriter:
        """An object of so many bytes, whose room is taken, as far as that can be known. whole_pages: whether offsets, blocks and
        their addresses are multiples of 4 KiB in all writes. Raises AlreadyExists for a key that has an object, finished or not,
        which is never written over, CapacityError or Unavailable."""
        ...

    def open(self, key: str, *, whole_pages: bool) -> AbstractContextManager[ObjectReader]:
        """The object, for the body of a `with`. whole_pages: as in `begin`, of all reads. Raises Unavailable, also where it is
        entered, and for an OSError of the body."""
        ...

    def put(self, key: str, content: bytes) -> None:
        """Keep a small object, in place of one that was put there. Raises CapacityError or Unavailable; then none is there."""
        ...

    def get(self, key: str) -> bytes | None:
        """All of an object, None for none. Raises Unavailable."""
        ...

    def remove(self, key: str) -> None:
        """Remove an object, finished or not, if it is there. Who has it open may read on, or gets Unavailable. Raises
        Unavailable where it stays."""
        ...

    def list(self) -> dict[str, int]:
        """The bytes of every object, by its key. One that somebody began and never finished, in this process or another, stands
        there with a dot before its key, if it takes any room. Raises Unavailable."""
        ...

    def sync(self) -> None:
        """Wait until no loss of power undoes what was finished. Raises Unavailable, and from then on always, because nobody knows
        what is lost."""

    def close(self) -> None:
        """Give up what the store needs while it is open. Nothing else is called afterwards; closing twice does nothing."""

    def mark(self, key: str, text: str) -> None:
        """Set a finished object's mark, ASCII, "" for none; nothing for an object that is not there. A mark is lost where an
        object is copied, and a store need not have any: what it would be removed by then stays, until somebody asks for its
        removal."""

    def marked(self, key: str) -> str:  # noqa: ARG002  # of those without marks
        """The mark of an object, "" for none."""
        return ""

    def file(self, key: str) -> Path | None:  # noqa: ARG002  # of those without files
        """The path of a finished object that is a file of this machine, for native code that reads pages of it by itself; None
        where it reads through `open`."""
        return None

    @contextmanager
    def local(self, key: str) -> Iterator[Path]:
        """A file that holds what an object holds, to be read while the body runs. Raises NotFound for none, and Unavailable."""
        content = self.get(key)
        if content is None:
            raise missing(self.where, key)
        with _scratch(f"{self.where}/{key}") as path:
            path.write_bytes(content)
            yield path

    @contextmanager
    def saving(self, key: str) -> Iterator[Path]:
        """A path for the body to write a file to, whose bytes are an object from then on, in place of one that was put there. If
        the body raises, none is there. Raises what `put` does."""
        with _scratch(f"{self.where}/{key}") as path:
            yield path
            self.put(key, path.read_bytes())


@contextmanager
def _scratch(place: str) -> Iterator[Path]:
    """The path of a file that goes when the body ends. An OSError of the body is Unavailable."""
    try:
        with TemporaryDirectory(prefix="kvdb-") as folder:
            yield Path(folder) / "object"
    except OSError as error:
        raise Unavailable(f"{place} has no file here: {error.strerror}") from None


def missing(where: str, key: str) -> NotFound:
    """The error for an object that is wanted as a file, and is not there."""
    return NotFound(f"{where}/{key} cannot be read: it is gone")


def unreadable(place: str, why: str) -> Unavailable:
    """The error for a segment that cannot be read. place: of its object."""
    return Unavailable(
        f"{place}, which holds a segment that was offloaded, cannot be read: {why}; make it readable again, or drop the contexts "
        "over it and import them anew"
    )
