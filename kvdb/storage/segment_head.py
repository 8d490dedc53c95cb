"""What stands in the head of a segment's file: its contents, and the checksums of everything behind it.

Layout, little-endian: magic, 8 bytes; length of the head that follows, uint32; its CRC-32C, uint32; the head: the length of a
text, uint32, the text, JSON in UTF-8 with the fields of `Contents`, and the CRC-32C of every unit, uint32 `[layers, units]`. A
unit is what can be read and checked alone: a page of 4 KiB where blocks are whole pages, else a block, as in all files of version
1.

Processors have an instruction for CRC-32C: `_native.crc32c` sums as fast as memory is read (21 to 26 GB/s, zlib.crc32 only 2.9),
so checking takes hardly any time from the computation that hides the loading.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from hashlib import sha256

import numpy as np
import numpy.typing as npt

import kvdb._native as _native
from kvdb.errors import IntegrityError
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.direct_io import PAGE
from kvdb.types import Addresses

Sums = npt.NDArray[np.uint32]
MAGIC = b"KVDBSEG\n"
VERSION = 2
HEAD_AT = len(MAGIC) + 8
PIECE_BYTES = 4 << 20
PIECE_BLOCKS = 1024
"""The most that one read or write moves: from 1 MiB on the disk is no faster, as measured, and Linux takes at most 1,024 buffers
in a call."""


@dataclass(frozen=True)
class Contents:
    """The contents of a file. key: identifies this very file, so that it cannot be mistaken for another. spec: the digest of the
    model's spec. version: that of the file's format."""

    key: str
    spec: str
    layout: BlockLayout
    layers: int
    tokens: int
    version: int = VERSION

    @cached_property
    def blocks(self) -> int:
        """The number of blocks of one layer."""
        return self.layout.blocks_for(self.tokens)

    @cached_property
    def unit_nbytes(self) -> int:
        """The bytes that one checksum is of."""
        return PAGE if self.direct and self.version > 1 else self.layout.nbytes

    @cached_property
    def units(self) -> int:
        """The number of checksums of one layer."""
        return self.blocks * self.layout.nbytes // self.unit_nbytes

    @cached_property
    def extent_nbytes(self) -> int:
        return _pages(self.blocks * self.layout.nbytes)

    @cached_property
    def first_version(self) -> "Contents":
        """The same as files of version 1 say it."""
        return replace(self, version=1)

    @cached_property
    def text(self) -> bytes:
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"layout": _fields_of(self.layout)}
        return json.dumps(values, sort_keys=True).encode()

    @cached_property
    def head_nbytes(self) -> int:
        return 4 + len(self.text) + 4 * self.layers * self.units

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

    def layer_at(self, layer: int) -> int:
        """Where a layer begins in the file."""
        return self.extents_at + layer * self.extent_nbytes

    def pieces(self) -> Iterator[slice]:
        """The ranges of a layer's blocks that are each moved in one call."""
        count = min(PIECE_BLOCKS, max(1, PIECE_BYTES // self.layout.nbytes))
        for first in range(0, self.blocks, count):
            yield slice(first, min(first + count, self.blocks))

    def units_of(self, blocks: slice) -> slice:
        """The checksums of these blocks among those of their layer."""
        each = self.layout.nbytes // self.unit_nbytes
        return slice(blocks.start * each, blocks.stop * each)

    def checksums(self, addresses: Addresses) -> Sums:
        """The checksums of the blocks at these addresses, uint32 `[units]`."""
        starts = np.arange(0, self.layout.nbytes, self.unit_nbytes, dtype=np.uint64)
        return _checksums((addresses[:, None] + starts).reshape(-1), self.unit_nbytes)

    def head(self, sums: Sums) -> bytes:
        """Everything that stands before the first layer, but for zeros at its end. sums: `[layers, units]`."""
        head = len(self.text).to_bytes(4, "little") + self.text + sums.astype("<u4").tobytes()
        return MAGIC + len(head).to_bytes(4, "little") + _checksum(head).to_bytes(4, "little") + head

    def read_head(self, place: str, start: bytes) -> Sums:
        """The checksums that stand in the first `HEAD_AT + head_nbytes` bytes of a segment, `[layers, units]`. place: where it
        is, for messages. Raises IntegrityError for one that is not of these contents."""
        head = start[HEAD_AT:]
        expected_start = MAGIC + self.head_nbytes.to_bytes(4, "little") + _checksum(head).to_bytes(4, "little")
        text = len(self.text).to_bytes(4, "little") + self.text
        if start[:HEAD_AT] != expected_start or not head.startswith(text):
            raise corrupt(place, "its head is not what was written")
        return np.frombuffer(head[len(text) :], "<u4").reshape(self.layers, self.units).astype(np.uint32)

    def digest(self, sums: Sums) -> str:
        """The SHA-256 of the head, hex: it names what the file holds."""
        return sha256(self.text + sums.astype("<u4").tobytes()).hexdigest()


def corrupt(place: str, what: str) -> IntegrityError:
    """The error for a segment that is not as it was written. place: where it is."""
    return IntegrityError(
        f"{place}, which holds a segment that was offloaded, was changed: {what}; nothing of it is used, so drop the contexts "
        "over it and import them anew, and check the disk"
    )


@cache
def _fields_of(layout: BlockLayout) -> dict[str, str | int]:
    """What a head says of the layout. A store has few of them and many files."""
    values = {field.name: getattr(layout, field.name) for field in fields(layout)}
    if not layout.format:  # as all files were before there were formats
        del values["format"]
    if layout.is_symmetric:  # as all blocks were before there were others
        del values["value_dim"], values["values_in_keys"]
    return values


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _checksums(addresses: Addresses, nbytes: int) -> Sums:
    sums = np.empty(len(addresses), np.uint32)
    _native.crc32c(addresses, nbytes, sums)
    return sums


def _checksum(data: bytes) -> int:
    array = np.frombuffer(data, np.uint8)
    return int(_checksums(np.array([array.ctypes.data], np.uint64), len(data))[0])
