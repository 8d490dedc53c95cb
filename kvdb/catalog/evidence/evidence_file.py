"""The evidence of a segment as it is kept beside it while that is on disk.

Layout, little-endian: magic, 8 bytes; length of the whole file, uint64; length of the text that follows, uint32; the text, JSON
in UTF-8: the version, the fields of `Owner`, the number of queries of each layer, and for each record its layer, its way and
four numbers, how many errors of a head, rows, times and query heads it has; then the arrays of each record, one behind the other
in the order of ARRAYS; last the CRC-32C of everything before it, uint32.

Wrong evidence would let wrong answers pass. So a file with any fault is not used at all, and everything is proven anew.
"""

import json
import logging
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import kvdb._native as _native
from kvdb.attention.signs import SIGNS
from kvdb.catalog.evidence.evidence import Evidence, EvidenceRecords
from kvdb.catalog.evidence.way_record import RECENT_AUDITS, SAMPLES_MAX, SAMPLES_MIN, TIMES_MAX, WayRecord
from kvdb.errors import IntegrityError, KvdbError, SpecMismatch, Unsupported
from kvdb.storage.disk import DiskTier
from kvdb.storage.stored_segment import StoredSegment
from query_optimizer.order_statistics import AUDITS_MIN
from query_optimizer.ways import Way

log = logging.getLogger(__name__)
SUFFIX = ".evidence"
MAGIC = b"KVDBEVD\n"
VERSION = 2
START = struct.Struct("<8sQI")
SUM = struct.Struct("<I")
ARRAYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "counts": ("<i8", ("heads",)),
    "errors": ("<f4", ("heads", "errors")),
    "missed": ("<f4", ("heads", "errors")),
    "rows": ("<f4", ("rows", "heads")),
    "times": ("<f8", ("times",)),
    "given_up": ("<f8", ("heads",)),
    "faults": ("|b1", ("heads", "faults")),
    "last": ("<i8", ("heads",)),
    "waits_until": ("<i8", ("heads",)),
    "withdrawn": ("<i8", ("heads",)),
    "stale": ("<i8", ("heads",)),
    "seen": ("<f4", ("edges", "signs", "q_heads")),
    "unlike_seen": ("<f4", ("edges", "signs", "q_heads")),
    "unlike_errors": ("<f4", ("heads", "unlike")),
    "unlike_counts": ("<i8", ("heads",)),
    "unlike_since": ("<i8", ("heads",)),
}
"""The type and shape of each array of a `WayRecord`."""
SIZES_MAX = {"errors": SAMPLES_MAX, "rows": SAMPLES_MAX, "times": TIMES_MAX, "q_heads": None}
SIZES = {"faults": RECENT_AUDITS, "edges": 2, "signs": SIGNS, "unlike": AUDITS_MIN}


@dataclass(frozen=True)
class Owner:
    """The segment that evidence belongs to. key: names it among all others. spec: the digest of its model's spec. kv_heads: of
    every layer, or of each where they differ."""

    key: str
    spec: str
    layers: int
    kv_heads: int | tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.kv_heads, int):  # JSON has lists
            object.__setattr__(self, "kv_heads", tuple(self.kv_heads))

    def heads_of(self, layer: int) -> int:
        """The KV heads of one layer."""
        return self.kv_heads if isinstance(self.kv_heads, int) else self.kv_heads[layer]

    @classmethod
    def of(cls, segment: StoredSegment) -> "Owner":
        contents = segment.contents
        heads = tuple(layout.kv_heads for layout in contents.layouts)
        return cls(contents.key, contents.spec, contents.layers, heads[0] if len(set(heads)) == 1 else heads)


def put_away(evidence: Evidence, disk: DiskTier, segment: StoredSegment) -> None:
    """Move evidence from memory to beside its segment. Where that cannot be written, it stays in memory, and a line in
    the log says so."""
    records = evidence.take()
    if not records.ways:
        evidence.restore(records)
        return
    try:
        disk.write_beside(segment, SUFFIX, pack(Owner.of(segment), records))
    except KvdbError as error:
        evidence.restore(records)
        log.warning("evidence stays in main memory: %s", error)


def bring_back(evidence: Evidence, disk: DiskTier, segment: StoredSegment) -> None:
    """Move evidence back to memory, and remove it there. A file that is not as it was written is dropped, with a line in the
    log."""
    records = _read(disk, segment)
    if records is not None:
        evidence.restore(records)
        disk.remove_beside(segment, SUFFIX)


def look(disk: DiskTier, segment: StoredSegment) -> Evidence | None:
    """A copy of the evidence beside a segment, None if there is none. A file that is not as it was written is dropped,
    with a line in the log."""
    records = _read(disk, segment)
    if records is None:
        return None
    evidence = Evidence()
    evidence.restore(records)
    return evidence


def pack(owner: Owner, records: EvidenceRecords) -> bytes:
    """The bytes of a file of these records."""
    listed, arrays = [], []
    for layer, ways in records.ways.items():
        for way, record in ways.items():
            sizes = {"errors": record.errors.shape[1], "rows": len(record.rows), "times": len(record.times)}
            sizes["q_heads"] = record.seen.shape[2]
            listed.append({"layer": layer, "way": way.to_dict(), "sizes": sizes})
            arrays += [np.ascontiguousarray(getattr(record, name), dtype).tobytes() for name, (dtype, _) in ARRAYS.items()]
    fields = {"version": VERSION, "owner": asdict(owner), "queries": list(records.queries.items()), "records": listed}
    text = json.dumps(fields, sort_keys=True).encode()
    length = START.size + len(text) + sum(map(len, arrays)) + SUM.size
    content = b"".join([START.pack(MAGIC, length, len(text)), text, *arrays])
    return content + SUM.pack(_checksum(content))


def unpack(owner: Owner, content: bytes) -> EvidenceRecords:
    """The records that were packed for this owner.

    Raises IntegrityError for a file that was cut short or changed and for one of another segment, Unsupported for another
    version, and SpecMismatch for another model's spec.
    """
    text = _checked_text(owner, content)
    try:
        fields = json.loads(text)
        if fields["version"] != VERSION:
            told = f"the file of {owner.key} has version {fields['version']!r}; expected {VERSION}"
            raise Unsupported(f"{told}: what it proves is proven anew")
        _check_owner(Owner(**fields["owner"]), owner)
        queries = {_layer(layer, owner): _count(count) for layer, count in fields["queries"]}
        return EvidenceRecords(queries, _records(content[START.size + len(text) : -SUM.size], fields["records"], owner))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _corrupt(owner, f"its text cannot be read ({error!r})") from None


def _read(disk: DiskTier, segment: StoredSegment) -> EvidenceRecords | None:
    try:
        content = disk.read_beside(segment, SUFFIX)
        return None if content is None else unpack(Owner.of(segment), content)
    except KvdbError as error:
        log.warning("evidence is dropped: %s", error)
        disk.remove_beside(segment, SUFFIX)
        return None


def _checked_text(owner: Owner, content: bytes) -> bytes:
    """The JSON of a file that is whole and unchanged."""
    if len(content) < START.size + SUM.size:
        raise _corrupt(owner, f"it has {len(content)} bytes")
    magic, length, text_nbytes = START.unpack_from(content)
    if magic != MAGIC:
        raise _corrupt(owner, "it does not begin as such a file does")
    if length != len(content):
        raise _corrupt(owner, f"it has {len(content):,} bytes of the {length:,} that were written")
    if SUM.unpack_from(content, length - SUM.size)[0] != _checksum(content[: -SUM.size]):
        raise _corrupt(owner, "it does not match its checksum")
    return content[START.size : START.size + text_nbytes]


def _check_owner(found: Owner, expected: Owner) -> None:
    if found.spec != expected.spec:
        told = f"the file of {expected.key} is of spec {found.spec:.16}; expected {expected.spec:.16}"
        raise SpecMismatch(f"{told}: it proves nothing here")
    if found != expected:
        raise IntegrityError(f"the file is of another segment, {found}; expected {expected}: it proves nothing here")


def _records(payload: bytes, listed: Sequence[Mapping[str, Any]], owner: Owner) -> dict[int, dict[Way, WayRecord]]:
    """Cut the arrays out of the file. Raises KeyError, TypeError, ValueError or OverflowError for what was never packed."""
    ways: dict[int, dict[Way, WayRecord]] = {}
    at = 0
    for one in listed:
        layer, way = _layer(one["layer"], owner), Way.from_dict(one["way"])
        sizes = {name: _count(one["sizes"][name], most) for name, most in SIZES_MAX.items()}
        kv_heads = owner.heads_of(layer)
        if not sizes["q_heads"] or sizes["q_heads"] % kv_heads:
            raise ValueError(f"{sizes['q_heads']} query heads of {kv_heads} KV heads")
        sizes |= {"heads": kv_heads, **SIZES}
        arrays: dict[str, Any] = {}
        for name, (dtype, axes) in ARRAYS.items():
            shape = tuple(sizes[axis] for axis in axes)
            flat = np.frombuffer(payload, dtype, math.prod(shape), at)
            arrays[name] = flat.reshape(shape).astype(np.dtype(dtype).newbyteorder("="))
            at += flat.nbytes
        ways.setdefault(layer, {})[way] = _checked(WayRecord(**arrays))
    if at != len(payload):
        raise ValueError(f"{len(payload) - at} bytes too many")
    return ways


def _checked(record: WayRecord) -> WayRecord:
    """The record. Raises ValueError for numbers that no audit leaves."""
    size = record.errors.shape[1]
    full = record.counts > size
    wrong = size < SAMPLES_MIN or record.counts.min(initial=0) < 0 or (full.any() and size != SAMPLES_MAX)
    wrong = wrong or (record.errors < 0).any() or (record.rows < 0).any() or np.isnan(record.missed).any()
    wrong = wrong or np.isnan(record.seen).any() or np.isnan(record.unlike_seen).any() or (record.unlike_errors < 0).any()
    wrong = wrong or not ((record.unlike_counts >= 0) & (record.unlike_counts < AUDITS_MIN)).all()
    wrong = wrong or not (record.times >= 0).all() or not ((record.given_up >= 0) & (record.given_up <= 1)).all()
    if wrong or min(record.withdrawn.min(initial=1), record.stale.min(initial=1)) < 1:
        raise ValueError("numbers that no audit leaves")
    return record


def _layer(number: object, owner: Owner) -> int:
    return _count(number, owner.layers - 1)


def _count(number: object, most: int | None = None) -> int:
    if type(number) is not int or number < 0 or (most is not None and number > most):
        raise ValueError(f"{number!r} is no count up to {most}")
    return number


def _checksum(content: bytes) -> int:
    array: npt.NDArray[np.uint8] = np.frombuffer(content, np.uint8)
    sums = np.empty(1, np.uint32)
    _native.crc32c(np.array([array.ctypes.data], np.uint64), len(content), sums)
    return int(sums[0])


def _corrupt(owner: Owner, what: str) -> IntegrityError:
    return IntegrityError(f"the file of {owner.key} was changed: {what}; what it proves is proven anew")
