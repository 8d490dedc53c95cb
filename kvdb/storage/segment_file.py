"""A segment as one file, whose layers are read one by one, straight into blocks of main memory.

Behind its head (`kvdb.storage.segment_head`), from the next multiple of 4 KiB on, stands an extent for each layer: its blocks in
order, as they lie in memory, padded to a multiple of 4 KiB. The last block is written with zeros behind the last token, because
tokens of another segment may be left there. A file is read and written past the page cache (O_DIRECT) where its blocks are pages:
what is offloaded then takes no memory as cache.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np

import kvdb._native as _native
import kvdb.storage.direct_io as direct_io
from kvdb.errors import IntegrityError, Unavailable
from kvdb.storage.block_table import BlockTable
from kvdb.storage.segment_head import Contents, Sums, corrupt
from kvdb.types import Addresses

log = logging.getLogger(__name__)


class SegmentFile:
    """A finished file at `path`, which is never written again. Its head is read and checked before anything else of it is."""

    def __init__(self, path: Path, expected: Contents, digest: str = "") -> None:
        """digest: what `Contents.digest` is of it; "" for a file of which nobody noted it."""
        self.path = path
        self.contents = expected
        self.digest = digest

    @cached_property
    def _sums(self) -> Sums:
        """The checksums of all blocks. Raises IntegrityError for a file whose head is not that of its contents, Unavailable for
        one that cannot be read."""
        with _open(self.path, direct_too=False) as file:
            sums = self.contents.read_head(self.path, file)
        if self.digest and self.contents.digest(sums) != self.digest:
            raise corrupt(self.path, "it holds another segment than the catalogue says")
        return sums

    @classmethod
    def adopt(cls, path: Path, expected: Contents, digest: str = "") -> "SegmentFile":
        """A file that was written before, perhaps in an older version of the format. Raises IntegrityError for one of another
        length, and Unavailable for none."""
        with _open(path, direct_too=False) as file:
            contents = expected.of_version_in(file)
            contents.check_size(path, file)
        return cls(path, contents, digest)

    def check_head(self) -> None:
        """Raises IntegrityError for a file whose head is not that of its contents, Unavailable for one that cannot be read."""
        assert self._sums.size

    @property
    def nbytes(self) -> int:
        return self.contents.nbytes

    def read_layer(self, layer: int, table: BlockTable) -> None:
        """Fill the blocks of `table` with one layer, without the GIL; it has as many blocks as the layer was written with.

        Raises IntegrityError for a file that was cut short or changed, and Unavailable for one that cannot be read; then the
        contents of the blocks are unspecified.
        """
        assert table.layout == self.contents.layout
        assert len(table.addresses) == self.contents.blocks
        self._read(layer, np.ascontiguousarray(table.addresses))

    def pages(self, pool: _native.PagePool, layer: int, table: BlockTable) -> _native.LayerPages:
        """The pages of one layer, in the blocks of `table`, which stand one behind the other from a page on. What they raise when
        they are read is for `read_error`. Raises IntegrityError or Unavailable."""
        contents = self.contents
        assert table.layout == contents.layout
        assert len(table.addresses) == contents.blocks
        return _native.LayerPages(
            pool,
            int(table.addresses[0]),
            contents.extent_nbytes,
            contents.unit_nbytes if contents.direct else contents.extent_nbytes,
            str(self.path),
            contents.nbytes,
            contents.layer_at(layer),
            layer,
            contents.layout.nbytes,
            contents.unit_nbytes,
            self._sums[layer],
        )

    def verify(self) -> None:
        """Compare its head and all blocks, as they are on the disk now, with their checksums. Raises as `read_layer` does."""
        again, nbytes = SegmentFile(self.path, self.contents, self.digest), self.contents.layout.nbytes
        piece = next(self.contents.pieces()).stop
        scratch = direct_io.page_aligned(piece * nbytes)
        addresses = (scratch.ctypes.data + nbytes * np.arange(piece)).astype(np.uint64)
        for layer in range(self.contents.layers):
            again._read(layer, np.resize(addresses, self.contents.blocks))  # each piece in the same memory

    def _read(self, layer: int, addresses: Addresses) -> None:
        contents, sums, nbytes = self.contents, self._sums[layer], self.contents.layout.nbytes
        at = contents.layer_at(layer)
        with _open(self.path, direct_too=contents.direct) as file:
            contents.check_size(self.path, file)

            def read(piece: slice) -> None:
                if direct_io.read(file, at + piece.start * nbytes, addresses[piece], nbytes) < len(addresses[piece]) * nbytes:
                    raise corrupt(self.path, f"it ends within layer {layer}")
                units = contents.units_of(piece)
                wrong = np.flatnonzero(contents.checksums(addresses[piece]) != sums[units])  # while they are in the cache
                if len(wrong):
                    block = (units.start + wrong[0]) * contents.unit_nbytes // nbytes
                    raise corrupt(self.path, f"block {block} of layer {layer} does not match its checksum")

            direct_io.at_once(read, contents.pieces())

    def sync(self) -> None:
        """Wait until the file has reached the disk. Raises Unavailable; what was not written then may be lost, and waiting again
        would not say so."""
        with _open(self.path, direct_too=False) as file:
            direct_io.sync(file)

    def unlink(self) -> None:
        """Remove the file; one that is gone already is no error. One that cannot be removed stays, with a line in the log."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s stays, as it cannot be removed: %s", self.path, error.strerror)


@contextmanager
def _open(path: Path, *, direct_too: bool) -> Iterator[int]:
    """Open a file to read from; an OSError there or in the body becomes Unavailable."""
    try:
        with direct_io.open_file(path, os.O_RDONLY, direct=direct_too) as file:
            yield file
    except OSError as error:
        raise _unreadable(path, error) from None


def read_error(error: OSError) -> IntegrityError | Unavailable:
    """What is raised where the pages of a file raised this."""
    path = Path(error.filename)
    return corrupt(path, str(error.strerror)) if error.errno == errno.EBADMSG else _unreadable(path, error)


def _unreadable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"{path}, which holds a segment that was offloaded, cannot be read: {error.strerror}; make it readable again, or "
        "drop the contexts over it and import them anew"
    )
