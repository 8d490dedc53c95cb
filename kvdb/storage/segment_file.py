"""A segment as one file, whose layers are read one by one, straight into blocks of main memory.

Layout, little-endian: magic, 8 bytes; length of the head that follows, uint32; its CRC-32C, uint32; the head: the length of a
text, uint32, the text, JSON in UTF-8 with the fields of `Contents` and the version, and the CRC-32C of every block, uint32
`[layers, blocks]`. Then, from the next multiple of 4 KiB on, an extent for each layer: its blocks in order, as they lie in
memory, padded to a multiple of 4 KiB. The last block is written with zeros behind the last token, because tokens of another
segment may be left there.

Processors have an instruction for CRC-32C: `_native.crc32c` sums as fast as memory is read (21 to 26 GB/s, zlib.crc32 only 2.9),
so checking takes hardly any time from the computation that hides the loading. For the same reason a file is read and written past
the page cache (O_DIRECT) where its blocks are pages; what is offloaded then takes no memory as cache. A file is written under
another name, synced to the disk and renamed, so a file of its own name is always whole; one that is to outlive the process
alone, and not the loss of power, is not synced.
"""

import errno
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvdb._native as _native
import kvdb.storage.direct_io as direct_io
from kvdb.errors import CapacityError, IntegrityError, Unavailable
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.block_table import BlockTable
from kvdb.storage.direct_io import PAGE
from kvdb.types import Addresses

log = logging.getLogger(__name__)
Sums = npt.NDArray[np.uint32]
MAGIC = b"KVDBSEG\n"
VERSION = 1
HEAD_AT = len(MAGIC) + 8
PIECE_BYTES = 4 << 20
PIECE_BLOCKS = 1024
"""The most that one read or write moves: from 1 MiB on the disk is no faster, as measured, and Linux takes at most 1,024 buffers
in a call."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Contents:
    """The contents of a file. key: identifies this very file, so that it cannot be mistaken for another. spec: the digest of the
    model's spec."""

    key: str
    spec: str
    layout: BlockLayout
    layers: int
    tokens: int

    @cached_property
    def blocks(self) -> int:
        """The number of blocks of one layer."""
        return self.layout.blocks_for(self.tokens)

    @cached_property
    def extent_nbytes(self) -> int:
        return _pages(self.blocks * self.layout.nbytes)

    @cached_property
    def text(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True).encode()

    @cached_property
    def head_nbytes(self) -> int:
        return 4 + len(self.text) + 4 * self.layers * self.blocks

    @cached_property
    def extents_at(self) -> int:
        return _pages(HEAD_AT + self.head_nbytes)

    @cached_property
    def nbytes(self) -> int:
        """The length of the whole file."""
        return self.extents_at + self.layers * self.extent_nbytes

    @property
    def direct(self) -> bool:
        """Whether its blocks are whole pages."""
        return self.layout.nbytes % PAGE == 0


class SegmentFile:
    """A finished file at `path`, which is never written again. Its head is read and checked before anything else of it is."""

    def __init__(self, path: Path, expected: Contents) -> None:
        self.path = path
        self.contents = expected

    @cached_property
    def _sums(self) -> Sums:
        """The checksums of all blocks. Raises IntegrityError for a file whose head is not that of its contents, Unavailable for
        one that cannot be read."""
        with _open(self.path, direct_too=False) as file:
            return _read_head(self.path, file, self.contents)

    @classmethod
    def write(cls, path: Path, contents: Contents, tables: Sequence[BlockTable], *, synced: bool = True) -> "SegmentFile":
        """Write these tables, one a layer and each whole, to a new file. synced: wait until it has reached the disk.

        Raises CapacityError where the disk is full and Unavailable where it cannot be written; then there is no file.
        """
        assert len(tables) == contents.layers
        assert all(table.length == contents.tokens and table.layout == contents.layout for table in tables)
        unfinished = path.with_name(f".{path.name}")
        renamed = False
        try:
            with direct_io.open_file(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct=contents.direct) as file:
                _write(file, contents, tables)
                if synced:
                    direct_io.sync(file)
            os.rename(unfinished, path)
            renamed = True
        except OSError as error:
            raise _not_written(path, contents.nbytes, error) from None
        finally:
            if not renamed:
                with suppress(OSError):
                    unfinished.unlink(missing_ok=True)
        written = cls(path, contents)
        assert written._sums.size, "its head can be read"
        return written

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

    def verify(self) -> None:
        """Compare its head and all blocks, as they are on the disk now, with their checksums. Raises as `read_layer` does."""
        again, nbytes = SegmentFile(self.path, self.contents), self.contents.layout.nbytes
        piece = next(_pieces(self.contents)).stop
        scratch = direct_io.page_aligned(piece * nbytes)
        addresses = (scratch.ctypes.data + nbytes * np.arange(piece)).astype(np.uint64)
        for layer in range(self.contents.layers):
            again._read(layer, np.resize(addresses, self.contents.blocks))  # each piece in the same memory

    def _read(self, layer: int, addresses: Addresses) -> None:
        contents, sums, nbytes = self.contents, self._sums[layer], self.contents.layout.nbytes
        at = contents.extents_at + layer * contents.extent_nbytes
        with _open(self.path, direct_too=contents.direct) as file:
            _check_size(self.path, file, contents)

            def read(piece: slice) -> None:
                if direct_io.read(file, at + piece.start * nbytes, addresses[piece], nbytes) < len(addresses[piece]) * nbytes:
                    raise _corrupt(self.path, f"it ends within layer {layer}")
                wrong = np.flatnonzero(_checksums(addresses[piece], nbytes) != sums[piece])  # while they are in the cache
                if len(wrong):
                    raise _corrupt(self.path, f"block {piece.start + wrong[0]} of layer {layer} does not match its checksum")

            direct_io.at_once(read, _pieces(contents))

    def sync(self) -> None:
        """Wait until the file has reached the disk. Raises Unavailable; what was not written then may be lost, and waiting again
        would not say so."""
        with _open(self.path, direct_too=False) as file:
            direct_io.sync(file)

    def check_length(self) -> None:
        """Raises IntegrityError for a file that is longer or shorter than it was written, and Unavailable for none."""
        with _open(self.path, direct_too=False) as file:
            _check_size(self.path, file, self.contents)

    def unlink(self) -> None:
        """Remove the file; one that is gone already is no error. One that cannot be removed stays, with a line in the log."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s stays, as it cannot be removed: %s", self.path, error.strerror)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _pieces(contents: Contents) -> Iterator[slice]:
    """The ranges of a layer's blocks that are each moved in one call."""
    count = min(PIECE_BLOCKS, max(1, PIECE_BYTES // contents.layout.nbytes))
    for first in range(0, contents.blocks, count):
        yield slice(first, min(first + count, contents.blocks))


def _checksums(addresses: Addresses, nbytes: int) -> Sums:
    sums = np.empty(len(addresses), np.uint32)
    _native.crc32c(addresses, nbytes, sums)
    return sums


def _checksum(data: bytes) -> int:
    array = np.frombuffer(data, np.uint8)
    return int(_checksums(np.array([array.ctypes.data], np.uint64), len(data))[0])


@contextmanager
def _open(path: Path, *, direct_too: bool) -> Iterator[int]:
    """Open a file to read from; an OSError there or in the body becomes Unavailable."""
    try:
        with direct_io.open_file(path, os.O_RDONLY, direct=direct_too) as file:
            yield file
    except OSError as error:
        raise Unavailable(
            f"{path}, which holds a segment that was offloaded, cannot be read: {error.strerror}; make it readable again, or "
            "drop the contexts over it and import them anew"
        ) from None


def _write(file: int, contents: Contents, tables: Sequence[BlockTable]) -> None:
    layout, sums = contents.layout, np.empty((contents.layers, contents.blocks), np.uint32)
    direct_io.reserve(file, contents.nbytes)
    scratch = direct_io.page_aligned(max(contents.extents_at, layout.nbytes))
    for layer, table in enumerate(tables):
        addresses = _zero_padded(table, scratch)
        at = contents.extents_at + layer * contents.extent_nbytes
        direct_io.at_once(partial(_write_piece, file, at, layout.nbytes, addresses, sums[layer]), _pieces(contents))
    text = contents.text
    head = len(text).to_bytes(4, "little") + text + sums.astype("<u4").tobytes()
    start = MAGIC + len(head).to_bytes(4, "little") + _checksum(head).to_bytes(4, "little") + head
    scratch[: contents.extents_at] = np.frombuffer(start.ljust(contents.extents_at, b"\0"), np.uint8)
    direct_io.write(file, 0, np.array([scratch.ctypes.data], np.uint64), contents.extents_at)


def _write_piece(file: int, at: int, nbytes: int, addresses: Addresses, sums: Sums, piece: slice) -> None:
    """Write some of a layer's blocks, of `nbytes` bytes, and set their checksums. at: where the layer begins in the file."""
    sums[piece] = _checksums(addresses[piece], nbytes)
    direct_io.write(file, at + piece.start * nbytes, addresses[piece], nbytes)


def _zero_padded(table: BlockTable, scratch: npt.NDArray[np.uint8]) -> Addresses:
    """The addresses of the table's blocks. A last block that is not full is copied to `scratch`, with zeros behind its tokens."""
    layout, addresses = table.layout, table.addresses.copy()
    filled = table.length % layout.block_size
    if filled:
        scratch[: layout.nbytes] = 0
        copy = np.array([scratch.ctypes.data], np.uint64)
        layout.copy(addresses[-1:], 0, copy, 0, filled)
        addresses[-1] = copy[0]
    return addresses


def _read_head(path: Path, file: int, expected: Contents) -> Sums:
    _check_size(path, file, expected)
    start = os.pread(file, HEAD_AT + expected.head_nbytes, 0)
    head = start[HEAD_AT:]
    expected_start = MAGIC + expected.head_nbytes.to_bytes(4, "little") + _checksum(head).to_bytes(4, "little")
    text = len(expected.text).to_bytes(4, "little") + expected.text
    if start[:HEAD_AT] != expected_start or not head.startswith(text):
        raise _corrupt(path, "its head is not what was written")
    return np.frombuffer(head[len(text) :], "<u4").reshape(expected.layers, expected.blocks).astype(np.uint32)


def _check_size(path: Path, file: int, contents: Contents) -> None:
    size = os.fstat(file).st_size
    if size != contents.nbytes:
        raise _corrupt(path, f"it has {size:,} bytes of the {contents.nbytes:,} that were written")


def _corrupt(path: Path, what: str) -> IntegrityError:
    return IntegrityError(
        f"{path}, which holds a segment that was offloaded, was changed: {what}; nothing of it is used, so drop the contexts "
        "over it and import them anew, and check the disk"
    )


def _not_written(path: Path, nbytes: int, error: OSError) -> CapacityError | Unavailable:
    kept = "everything stays in main memory"
    if error.errno in FULL:
        return CapacityError(
            f"{path.parent} has no room for a segment of {nbytes:,} bytes: {error.strerror}; {kept}, so free some of the disk, "
            "drop contexts, or set another storage.disk_path"
        )
    return Unavailable(
        f"{path.parent} cannot be written to: {error.strerror}; {kept}, so make the folder of storage.disk_path a writable one"
    )
