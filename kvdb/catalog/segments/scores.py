"""The scores of a segment's tokens, and their file, `N.scores` beside `N.segment`.

The file is written as soon as its segment has one. Layout, little-endian: length of the text that follows, uint32; the text, JSON
in UTF-8: the version, the key of the segment's file, and the name of the selector; then the scores, float16 `[layers, kv_heads,
tokens]`; last the CRC-32 of everything before, uint32. A file with any fault is dropped: what is kept first is then what was
used last.
"""

import json
import logging
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from kvdb.errors import KvdbError
from kvdb.storage.block_table import BlockTable
from kvdb.storage.disk import DiskTier
from kvdb.storage.segment_head import Contents
from kvdb.storage.stored_segment import StoredSegment
from kvdb.storage.token_scores import Float16, TokenScores

log = logging.getLogger(__name__)
SUFFIX = ".scores"
VERSION = 1
NUMBER = struct.Struct("<I")


class SegmentScores:
    """What a selector gave to each token of each layer and KV head of a segment, if one did: in main memory until the segment has
    a file, and beside that from then on."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        """tables: one a layer; their scores belong to the segment from now on."""
        self._layers: list[TokenScores] = []
        for table in tables:
            if table.scores is not None:
                self._layers.append(table.scores)
                table.scores = None
        if len(self._layers) < len(tables) or len({one.values.shape for one in self._layers}) > 1:
            self.release()

    def release(self) -> None:
        """Forget those in main memory."""
        layers, self._layers = self._layers, []
        for one in layers:
            one.release()

    def put_away(self, disk: DiskTier, segment: StoredSegment) -> None:
        """Move them to a file beside that of their segment. Where that fails, they stay, and a line in the log says so."""
        if self._layers:
            try:
                disk.write_beside(segment, SUFFIX, pack(segment.contents, self._layers))
            except KvdbError as error:
                log.warning("scores stay in main memory: %s", error)
            else:
                self.release()

    def read(self, place: tuple[DiskTier, StoredSegment] | None) -> tuple[str, Float16] | None:
        """The name of the selector, and the scores, float16 `[layers, kv_heads, tokens]`; None for none. place: of the segment's
        file. A file with a fault is dropped, with a line in the log."""
        layers = self._layers
        if layers:
            return layers[0].selector, np.stack([one.values for one in layers])
        if place is None or SUFFIX not in place[0].kept_beside(place[1]):
            return None
        disk, segment = place
        try:
            content = disk.read_beside(segment, SUFFIX)
            return None if content is None else unpack(segment.contents, content)
        except (KvdbError, ValueError, KeyError, TypeError, struct.error) as error:
            log.warning("scores of %s are dropped: %s", segment.place, error)
            disk.remove_beside(segment, SUFFIX)
            return None

    def of_blocks(self, place: tuple[DiskTier, StoredSegment] | None, block_size: int) -> Float16 | None:
        """The score of each block, float16 `[layers, blocks]`: that of its best token in any head; None for none."""
        found = self.read(place)
        if found is None:
            return None
        best = found[1].max(axis=1)
        return np.maximum.reduceat(best, np.arange(0, best.shape[1], block_size), axis=1)


def pack(owner: Contents, layers: Sequence[TokenScores]) -> bytes:
    """The contents of the file of a segment's scores."""
    text = json.dumps({"version": VERSION, "key": owner.key, "selector": layers[0].selector}).encode()
    content = NUMBER.pack(len(text)) + text + b"".join(one.values.astype("<f2").tobytes() for one in layers)
    return content + NUMBER.pack(zlib.crc32(content))


def unpack(owner: Contents, content: bytes) -> tuple[str, Float16]:
    """What `pack` packed for this segment: the name of the selector, and the scores. Raises ValueError, KeyError, TypeError or
    struct.error for anything else."""
    if NUMBER.unpack_from(content, len(content) - NUMBER.size)[0] != zlib.crc32(content[: -NUMBER.size]):
        raise ValueError("the file does not match its checksum")
    begin = NUMBER.size + NUMBER.unpack_from(content)[0]
    fields = json.loads(content[NUMBER.size : begin])
    if (fields["version"], fields["key"]) != (VERSION, owner.key):
        raise ValueError(f"the file is of version {fields['version']!r} and of {fields['key']!r}")
    values = np.frombuffer(content[begin : -NUMBER.size], "<f2").astype(np.float16)
    return str(fields["selector"]), values.reshape(owner.layers, owner.layouts[0].kv_heads, owner.tokens)
