"""A segment as one object of a store, whose layers are read one by one, straight into blocks of main memory.

Behind its head (`kvdb.storage.segment_head`), from the next multiple of 4 KiB on, stands an extent for each layer: its blocks in
order, as they lie in memory, padded to a multiple of 4 KiB. The last block is written with zeros behind the last token, because
tokens of another segment may be left there.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise

import numpy as np

import kvdb._native as _native
import kvdb.storage.direct_io as direct_io
from kvdb.errors import IntegrityError, KvdbError, Unavailable
from kvdb.storage.block_table import BlockTable
from kvdb.storage.segment_head import HEAD_AT, TEXT_BYTES_MAX, Contents, Sums, corrupt
from kvdb.storage.segment_store import ObjectReader, SegmentStore, unreadable
from kvdb.types import Addresses


class StoredSegment:
    """A finished segment under a key of a store, which never changes. Its head is read and checked before anything else of it
    is. Thread-safe."""

    def __init__(self, store: SegmentStore, key: str, expected: Contents, digest: str = "") -> None:
        """digest: what `Contents.digest` is of it; "" for one of which nobody noted it."""
        self.key = key
        self.contents = expected
        self.digest = digest
        self._store = store

    @classmethod
    def adopt(cls, store: SegmentStore, key: str, expected: Contents, digest: str = "") -> "StoredSegment":
        """One that was written before, perhaps in an older version of the format, or without blocks that no query sees. Raises
        IntegrityError for one of another length, and Unavailable for none."""
        found = cls(store, key, expected, digest)
        with store.open(key, whole_pages=False) as reader:
            length = int.from_bytes(reader.read_bytes(HEAD_AT, 4), "little")
            found.contents = expected.as_written(reader.read_bytes(HEAD_AT + 4, min(length, TEXT_BYTES_MAX)))
            found._check_size(reader)
        return found

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self._store.where}/{self.key}"

    @property
    def nbytes(self) -> int:
        return self.contents.nbytes

    @cached_property
    def _sums(self) -> Sums:
        """The checksums of all blocks. Raises as `check_head` does."""
        with self._opened(whole_pages=False) as reader:
            start = reader.read_bytes(0, HEAD_AT + self.contents.head_nbytes)
        sums = self.contents.read_head(self.place, start)
        if self.digest and self.contents.digest(sums) != self.digest:
            raise corrupt(self.place, "it holds another segment than the catalogue says")
        return sums

    def check_head(self) -> None:
        """Raises IntegrityError for one whose head is not that of its contents, Unavailable for one that cannot be read."""
        assert self._sums.size

    def read_layer(self, layer: int, table: BlockTable) -> None:
        """Fill the blocks of `table` with one layer, without the GIL; it has as many blocks as the layer was written with.

        Raises IntegrityError for a segment that was cut short or changed, and Unavailable for one that cannot be read; then the
        contents of the blocks are unspecified.
        """
        assert table.layout == self.contents.layouts[layer]
        addresses = np.ascontiguousarray(table.addresses[table.skipped :])
        assert len(addresses) == self.contents.blocks[layer]
        self._read(layer, addresses)

    def pages(self, pool: _native.PagePool, layer: int, table: BlockTable) -> _native.LayerPages:
        """The pages of one layer, in the blocks of `table`, which stand one behind the other from a page on. What they raise when
        they are read is for `read_error`. Raises IntegrityError or Unavailable."""
        contents, file = self.contents, self._store.file(self.key)
        extent, sums = contents.extents[layer], self._sums
        assert table.layout == extent.layout
        assert len(table.addresses) - table.skipped == extent.blocks
        return _native.LayerPages(
            pool,
            int(table.addresses[table.skipped]),
            extent.nbytes,
            extent.unit_nbytes if contents.direct else extent.nbytes,
            self.place if file is None else str(file),
            contents.nbytes,
            extent.at,
            layer,
            extent.layout.nbytes,
            extent.unit_nbytes,
            sums[extent.first : extent.first + extent.units],
            self._read_pages if file is None else None,
        )

    def verify(self) -> None:
        """Compare its head and all blocks, as they are in the store now, with their checksums. Raises as `read_layer` does."""
        again = StoredSegment(self._store, self.key, self.contents, self.digest)
        for layer, extent in enumerate(self.contents.extents):
            piece, nbytes = next(extent.pieces()).stop, extent.layout.nbytes
            scratch = direct_io.page_aligned(piece * nbytes)
            addresses = (scratch.ctypes.data + nbytes * np.arange(piece)).astype(np.uint64)
            again._read(layer, np.resize(addresses, extent.blocks))  # each piece in the same memory

    def _read(self, layer: int, addresses: Addresses) -> None:
        extent, sums = self.contents.extents[layer], self._sums
        nbytes = extent.layout.nbytes
        with self._opened(whole_pages=self.contents.direct) as reader:

            def read(piece: slice) -> None:
                if reader.read(extent.at + piece.start * nbytes, addresses[piece], nbytes) < len(addresses[piece]) * nbytes:
                    raise corrupt(self.place, f"it ends within layer {layer}")
                units = extent.units_of(piece)
                wrong = np.flatnonzero(extent.checksums(addresses[piece]) != sums[units])  # while they are in the cache
                if len(wrong):
                    block = (units.start - extent.first + wrong[0]) * extent.unit_nbytes // nbytes
                    raise corrupt(self.place, f"block {block} of layer {layer} does not match its checksum")

            direct_io.at_once(read, extent.pieces())

    def _read_pages(self, offsets: Addresses, addresses: Addresses) -> None:
        """Fill pages of 4 KiB at these addresses from these offsets, uint64 `[n]`, for native code. Raises OSError, as that does
        for a file."""
        ends = np.flatnonzero(np.diff(offsets) != direct_io.PAGE) + 1
        try:
            with self._opened(whole_pages=True) as reader:
                for first, end in pairwise([0, *ends.tolist(), len(offsets)]):
                    reader.read(int(offsets[first]), addresses[first:end], direct_io.PAGE)
        except KvdbError as error:
            raise OSError(errno.EBADMSG if isinstance(error, IntegrityError) else errno.EIO, str(error)) from None

    @contextmanager
    def _opened(self, *, whole_pages: bool) -> Iterator[ObjectReader]:
        """The object, of the size that it was written with. Raises IntegrityError for another, and Unavailable for none."""
        with self._store.open(self.key, whole_pages=whole_pages) as reader:
            self._check_size(reader)
            yield reader

    def _check_size(self, reader: ObjectReader) -> None:
        if reader.nbytes != self.nbytes:
            raise corrupt(self.place, f"it has {reader.nbytes:,} bytes of the {self.nbytes:,} that were written")


def read_error(error: OSError) -> IntegrityError | Unavailable:
    """What is raised where the pages of a segment raised this. What a store said has no name of a file, and is said as it is."""
    place, why, damaged = str(error.filename), str(error.strerror), error.errno == errno.EBADMSG
    if not error.filename:
        return IntegrityError(why) if damaged else Unavailable(why)
    return corrupt(place, why) if damaged else unreadable(place, why)
