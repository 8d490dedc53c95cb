"""The file of a segment's statistics, `N.statistics` beside `N.segment`.

It is written when the store is closed, and read when somebody asks: a line of JSON in ASCII, and a line with its CRC-32 in
hexadecimal digits. The JSON has the version, the key of the segment's file, and for each layer the counts and averages, as
`Statistics.layers` gives them. A file with any fault is dropped, and what queries are like is observed anew.
"""

import json
import logging
import zlib

import numpy as np

from kvdb.catalog.evidence.statistics import LayerAverages, Statistics
from kvdb.errors import KvdbError
from kvdb.storage.disk import DiskTier
from kvdb.storage.segment_head import Contents
from kvdb.storage.stored_segment import StoredSegment
from kvdb.types import MEASURES

log = logging.getLogger(__name__)
SUFFIX = ".statistics"
VERSION = 1


def put_away(statistics: Statistics, disk: DiskTier, segment: StoredSegment) -> None:
    """Write statistics beside a segment, if there are any. Where that fails, a line in the log says so."""
    layers = statistics.layers()
    if layers:
        try:
            disk.write_beside(segment, SUFFIX, pack(segment.contents, layers))
        except KvdbError as error:
            log.warning("statistics are not kept: %s", error)


def bring_back(statistics: Statistics, disk: DiskTier, segment: StoredSegment) -> None:
    """Take over the statistics beside a segment, if nothing was observed yet. A file with a fault is dropped, with a line
    in the log."""
    if statistics.version or SUFFIX not in disk.kept_beside(segment):
        return
    try:
        content = disk.read_beside(segment, SUFFIX)
        if content is not None:
            statistics.restore(unpack(segment.contents, content))
    except (KvdbError, ValueError, KeyError, TypeError, OverflowError) as error:
        log.warning("statistics of %s are dropped: %s", segment.place, error)
        disk.remove_beside(segment, SUFFIX)


def pack(owner: Contents, layers: dict[int, LayerAverages]) -> bytes:
    """The contents of the file of a segment's statistics."""
    listed = {layer: {"counts": one.counts.tolist(), "averages": one.averages.tolist()} for layer, one in layers.items()}
    text = json.dumps({"version": VERSION, "key": owner.key, "layers": listed}, allow_nan=False)
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode("ascii")


def unpack(owner: Contents, content: bytes) -> dict[int, LayerAverages]:
    """What `pack` packed for this segment. Raises ValueError, KeyError, TypeError or OverflowError for anything else."""
    text, checksum, _ = content.split(b"\n")
    if int(checksum, 16) != zlib.crc32(text):
        raise ValueError("the file does not match its checksum")
    fields = json.loads(text)
    if (fields["version"], fields["key"]) != (VERSION, owner.key):
        raise ValueError(f"the file is of version {fields['version']!r} and of {fields['key']!r}")
    layers = {}
    for name, one in fields["layers"].items():
        counts, averages = np.array(one["counts"], np.int64), np.array(one["averages"], np.float32)
        right = 0 <= int(name) < owner.layers and counts.shape == averages.shape and counts.shape[:1] == (len(MEASURES),)
        right = right and not counts.shape[1] % owner.layouts[int(name)].kv_heads
        if not right or (counts < 0).any() or not np.isfinite(averages).all():
            raise ValueError(f"layer {name} holds numbers that no query leaves")
        layers[int(name)] = LayerAverages(counts, averages)
    return layers
