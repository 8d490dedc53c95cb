"""What stands in the head of a segment's file: its contents, and the checksums of everything behind it.

Layout, little-endian: magic, 8 bytes; length of the head that follows, uint32; its CRC-32C, uint32; the head: the length of a
text, uint32, the text, JSON in UTF-8 with the fields of `Contents`, and the CRC-32C of every unit, uint32, one layer behind the
other. A unit is what can be read and checked alone: a page of 4 KiB where the blocks of all layers are whole pages, else a block,
as in all files of version 1. The text has one `layout` and the number of `layers`, or `layouts`, runs of equal ones, where layers
differ.

Processors have an instruction for CRC-32C: `_native.crc32c` sums as fast as memory is read (21 to 26 GB/s, zlib.crc32 only 2.9),
so checking takes hardly any time from the computation that hides the loading.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from hashlib import sha256
from itertools import groupby
from typing import Any, NamedTuple

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
TEXT_BYTES_MAX = 1 << 20
PIECE_BYTES = 4 << 20
PIECE_BLOCKS = 1024
"""The most that one read or write moves: from 1 MiB on the disk is no faster, as measured, and Linux takes at most 1,024 buffers
in a call."""


class Extent(NamedTuple):
    """One layer of a file. at: where it begins. blocks: how many it has. unit_nbytes: the bytes that one checksum is of. first:
    the number of its first checksum among all, which stand in the order of the layers. units: how many it has. nbytes: its
    length."""

    layout: BlockLayout
    at: int
    blocks: int
    unit_nbytes: int
    first: int
    units: int
    nbytes: int

    def pieces(self) -> Iterator[slice]:
        """The ranges of its blocks that are each moved in one call."""
        count = min(PIECE_BLOCKS, max(1, PIECE_BYTES // self.layout.nbytes))
        for first in range(0, self.blocks, count):
            yield slice(first, min(first + count, self.blocks))

    def units_of(self, blocks: slice) -> slice:
        """The checksums of these blocks among those of the file."""
        each = self.layout.nbytes // self.unit_nbytes
        return slice(self.first + blocks.start * each, self.first + blocks.stop * each)

    def checksums(self, addresses: Addresses) -> Sums:
        """The checksums of its blocks at these addresses, uint32 `[units]`."""
        starts = np.arange(0, self.layout.nbytes, self.unit_nbytes, dtype=np.uint64)
        return _checksums((addresses[:, None] + starts).reshape(-1), self.unit_nbytes)


@dataclass(frozen=True)
class Contents:
    """The contents of a file. key: identifies this very file, so that it cannot be mistaken for another. spec: the digest of the
    model's spec. layouts: one a layer, of blocks of as many tokens. version: that of the file's format. unseen: how many tokens
    at the beginning of each layer no query sees, whole blocks of which are not there; none without any."""

    key: str
    spec: str
    layouts: tuple[BlockLayout, ...]
    tokens: int
    version: int = VERSION
    unseen: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.layouts)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The number of blocks that are there of each layer."""
        blocks, size = self.layouts[0].blocks_for(self.tokens), self.layouts[0].block_size
        return tuple(blocks - unseen // size for unseen in self.unseen) or self.layers * (blocks,)

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """Where each layer stands."""
        extents: list[Extent] = []
        at, first = self.extents_at, 0
        for layout, blocks in zip(self.layouts, self.blocks, strict=True):
            unit, nbytes = self._unit_nbytes(layout), blocks * layout.nbytes
            units = nbytes // unit
            extents.append(Extent(layout, at, blocks, unit, first, units, _pages(nbytes)))
            at, first = at + extents[-1].nbytes, first + units
        return tuple(extents)

    @cached_property
    def units(self) -> int:
        """The number of checksums of all layers."""
        each = zip(self.layouts, self.blocks, strict=True)
        return sum(blocks * layout.nbytes // self._unit_nbytes(layout) for layout, blocks in each)

    def as_written(self, text: bytes) -> "Contents":
        """These contents as a file with that text holds them: in an older version, or without blocks that no query sees. Those of
        a file that says something else are not these."""
        try:
            unseen = tuple(map(int, json.loads(text).get("unseen", ())))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return self
        ways = [replace(self, version=1), *([replace(self, unseen=unseen)] if len(unseen) == self.layers else [])]
        return next((way for way in ways if way.text == text), self)

    @cached_property
    def text(self) -> bytes:
        values: dict[str, Any] = {"key": self.key, "spec": self.spec, "tokens": self.tokens, "version": self.version}
        runs = [(len(list(same)), _fields_of(layout)) for layout, same in groupby(self.layouts)]
        if len(runs) == 1:
            values |= {"layers": self.layers, "layout": runs[0][1]}
        else:
            values["layouts"] = runs
        if any(self.unseen):
            values["unseen"] = self.unseen
        return json.dumps(values, sort_keys=True).encode()

    @cached_property
    def head_nbytes(self) -> int:
        return 4 + len(self.text) + 4 * self.units

    @cached_property
    def extents_at(self) -> int:
        return _pages(HEAD_AT + self.head_nbytes)

    @cached_property
    def nbytes(self) -> int:
        """The length of the whole file."""
        each = zip(self.layouts, self.blocks, strict=True)
        return self.extents_at + sum(_pages(blocks * layout.nbytes) for layout, blocks in each)

    @cached_property
    def direct(self) -> bool:
        """Whether its blocks are whole pages, in every layer."""
        return all(layout.nbytes % PAGE == 0 for layout in self.layouts)

    def head(self, sums: Sums) -> bytes:
        """Everything that stands before the first layer, but for zeros at its end. sums: `[units]`."""
        head = len(self.text).to_bytes(4, "little") + self.text + sums.astype("<u4").tobytes()
        return MAGIC + len(head).to_bytes(4, "little") + checksum(head).to_bytes(4, "little") + head

    def read_head(self, place: str, start: bytes) -> Sums:
        """The checksums that stand in the first `HEAD_AT + head_nbytes` bytes of a segment, `[units]`. place: where it is, for
        messages. Raises IntegrityError for one that is not of these contents."""
        head = start[HEAD_AT:]
        expected_start = MAGIC + self.head_nbytes.to_bytes(4, "little") + checksum(head).to_bytes(4, "little")
        text = len(self.text).to_bytes(4, "little") + self.text
        if start[:HEAD_AT] != expected_start or not head.startswith(text):
            raise corrupt(place, "its head is not what was written")
        return np.frombuffer(head[len(text) :], "<u4").astype(np.uint32)

    def digest(self, sums: Sums) -> str:
        """The SHA-256 of the head, hex: it names what the file holds."""
        return sha256(self.text + sums.astype("<u4").tobytes()).hexdigest()

    def _unit_nbytes(self, layout: BlockLayout) -> int:
        return PAGE if self.direct and self.version > 1 else layout.nbytes


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


def checksum(data: bytes) -> int:
    """The CRC-32C of some bytes."""
    array = np.frombuffer(data, np.uint8)
    return int(_checksums(np.array([array.ctypes.data], np.uint64), len(data))[0])
