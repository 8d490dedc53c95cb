"""How a segment's file is written: under another name, synced to the disk and renamed, so that a file of its own name is always
whole. One that is to outlive the process alone, and not the loss of power, is not synced."""

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvdb.storage.direct_io as direct_io
from kvdb.errors import CapacityError, Unavailable
from kvdb.storage.block_table import BlockTable
from kvdb.storage.segment_head import Contents, Sums
from kvdb.types import Addresses

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: Path, contents: Contents, tables: Sequence[BlockTable], *, synced: bool) -> None:
    """See `SegmentFile.write`."""
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


def _write(file: int, contents: Contents, tables: Sequence[BlockTable]) -> None:
    layout, sums = contents.layout, np.empty((contents.layers, contents.units), np.uint32)
    direct_io.reserve(file, contents.nbytes)
    scratch = direct_io.page_aligned(max(contents.extents_at, layout.nbytes))
    for layer, table in enumerate(tables):
        addresses = _zero_padded(table, scratch)
        direct_io.at_once(partial(_write_piece, file, contents, layer, addresses, sums[layer]), contents.pieces())
    scratch[: contents.extents_at] = np.frombuffer(contents.head(sums).ljust(contents.extents_at, b"\0"), np.uint8)
    direct_io.write(file, 0, np.array([scratch.ctypes.data], np.uint64), contents.extents_at)


def _write_piece(file: int, contents: Contents, layer: int, addresses: Addresses, sums: Sums, piece: slice) -> None:
    """Write some of a layer's blocks, and set their checksums among `sums`, those of the layer."""
    nbytes = contents.layout.nbytes
    sums[contents.units_of(piece)] = contents.checksums(addresses[piece])
    direct_io.write(file, contents.layer_at(layer) + piece.start * nbytes, addresses[piece], nbytes)


def _zero_padded(table: BlockTable, scratch: npt.NDArray[np.uint8]) -> Addresses:
    """The addresses of the table's blocks. A last block that is not full is copied to `scratch`, with zeros behind its tokens."""
    layout, addresses = table.layout, table.addresses.copy()
    filled = table.length % layout.block_size
    if filled and not layout.format:  # quantized blocks have zeros there
        scratch[: layout.nbytes] = 0
        copy = np.array([scratch.ctypes.data], np.uint64)
        layout.copy(addresses[-1:], 0, copy, 0, filled)
        addresses[-1] = copy[0]
    return addresses


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
