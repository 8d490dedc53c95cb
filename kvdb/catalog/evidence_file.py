"""Evidence of how wrong ways of answering are, as a file beside a segment's own.

Layout, little-endian: magic, 8 bytes; length of the whole file, uint64; length of the text that follows, uint32; the text, JSON
in UTF-8: the version, the fields of `Owner`, and for each of the samples its layer, way and n; then for each of the samples, one
behind the other, errors and missed, float32 `[n, kv_heads]` each; last the CRC-32C of everything before it, uint32. A file is
written under another name and renamed, so that a name is never half a file.

Nothing approximate may be served for evidence that is not this segment's: whatever is wrong with a file, none of it is used, and
everything is proven anew.
"""

import json
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvdb._native as _native
from kvdb.errors import IntegrityError, KvdbError, SpecMismatch, Unavailable, Unsupported
from kvdb.types import Float32

log = logging.getLogger(__name__)
MAGIC = b"KVDBEVD\n"
VERSION = 1
START = struct.Struct("<8sQI")
SUM = struct.Struct("<I")
FLOAT = np.dtype("<f4")


@dataclass(frozen=True)
class Owner:
    """The segment that evidence belongs to. key: names it among all others. spec: the digest of its model's spec."""

    key: str
    spec: str
    layers: int
    kv_heads: int


@dataclass(frozen=True, eq=False)
class WaySamples:
    """Audits of one way of answering in one layer, in the order in which they were made.

    way: what was done, as plain values. errors, missed: float32 `[n, kv_heads]`, as in `kvdb.catalog.evidence.Audit`; errors are
    NaN where a head was not audited.
    """

    layer: int
    way: Mapping[str, Any]
    errors: Float32
    missed: Float32


def save(path: Path, owner: Owner, samples: Sequence[WaySamples]) -> None:
    """Replace `path` by a file of this evidence. Raises Unavailable where it cannot be written; then `path` is as it was."""
    assert all(one.errors.shape == one.missed.shape == (len(one.errors), owner.kv_heads) for one in samples)
    listed = [{"layer": one.layer, "way": dict(one.way), "n": len(one.errors)} for one in samples]
    text = json.dumps({"version": VERSION, "owner": asdict(owner), "samples": listed}, sort_keys=True).encode()
    arrays = [np.ascontiguousarray(array, FLOAT).tobytes() for one in samples for array in (one.errors, one.missed)]
    length = START.size + len(text) + sum(map(len, arrays)) + SUM.size
    content = b"".join([START.pack(MAGIC, length, len(text)), text, *arrays])
    unfinished = path.with_name(f".{path.name}")
    try:
        with unfinished.open("wb") as file:
            file.write(content + SUM.pack(_checksum(content)))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except OSError as error:
        raise Unavailable(f"{path} cannot be written: {error.strerror}; its evidence is kept in memory only") from None
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: Path, owner: Owner) -> list[WaySamples]:
    """The evidence that was saved for this owner.

    Raises IntegrityError for a file that was cut short or changed and for one of another segment, Unsupported for another
    version, SpecMismatch for another model's spec, and Unavailable for a file that cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Unavailable(f"{path} cannot be read: {error.strerror}; what it proves is proven anew") from None
    text = _checked_text(path, content)
    try:
        fields = json.loads(text)
        if fields["version"] != VERSION:
            raise Unsupported(f"{path} is of version {fields['version']!r}; expected {VERSION}: what it proves is proven anew")
        found = Owner(**fields["owner"])
        _check_owner(path, found, owner)
        return _samples(content[START.size + len(text) : -SUM.size], fields["samples"], owner)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _corrupt(path, f"its text cannot be read ({error!r})") from None


def load_or_none(path: Path, owner: Owner) -> list[WaySamples] | None:
    """The evidence that was saved for this owner, None where there is no file; None and a line in the log for a file that is not
    exactly what was saved."""
    if not path.exists():
        return None
    try:
        return load(path, owner)
    except KvdbError as error:
        log.warning("evidence is dropped: %s", error)
        return None


def _checked_text(path: Path, content: bytes) -> bytes:
    """The JSON of a file that is whole and unchanged."""
    if len(content) < START.size + SUM.size:
        raise _corrupt(path, f"it has {len(content)} bytes")
    magic, length, text_nbytes = START.unpack_from(content)
    if magic != MAGIC:
        raise _corrupt(path, "it does not begin as such a file does")
    if length != len(content):
        raise _corrupt(path, f"it has {len(content):,} bytes of the {length:,} that were written")
    if SUM.unpack(content[-SUM.size :])[0] != _checksum(content[: -SUM.size]):
        raise _corrupt(path, "it does not match its checksum")
    return content[START.size : START.size + text_nbytes]


def _check_owner(path: Path, found: Owner, expected: Owner) -> None:
    if found.spec != expected.spec:
        raise SpecMismatch(f"{path} is evidence of spec {found.spec:.16}; expected {expected.spec:.16}: it proves nothing here")
    if found != expected:
        raise IntegrityError(f"{path} is evidence of another segment, {found}; expected {expected}: it proves nothing here")


def _samples(payload: bytes, listed: Sequence[Mapping[str, Any]], owner: Owner) -> list[WaySamples]:
    """Cut the arrays out of the file. Raises KeyError, TypeError, ValueError or OverflowError for what was never saved."""
    samples, at = [], 0
    for one in listed:
        layer, way, n = one["layer"], one["way"], one["n"]
        if type(layer) is not int or not 0 <= layer < owner.layers or not isinstance(way, dict) or type(n) is not int or n < 0:
            raise ValueError(f"layer {layer!r}, way {way!r}, n {n!r}")
        errors, missed = (
            np.frombuffer(payload, FLOAT, 2 * n * owner.kv_heads, at).reshape(2, n, owner.kv_heads).astype(np.float32)
        )
        if (errors < 0).any() or np.isnan(missed).any():
            raise ValueError(f"errors below 0, or no number, in layer {layer}")
        at += 2 * n * owner.kv_heads * FLOAT.itemsize
        samples.append(WaySamples(layer, way, errors, missed))
    if at != len(payload):
        raise ValueError(f"{len(payload) - at} bytes too many")
    return samples


def _checksum(content: bytes) -> int:
    array: npt.NDArray[np.uint8] = np.frombuffer(content, np.uint8)
    sums = np.empty(1, np.uint32)
    _native.crc32c(np.array([array.ctypes.data], np.uint64), len(content), sums)
    return int(sums[0])


def _corrupt(path: Path, what: str) -> IntegrityError:
    return IntegrityError(f"{path}, which holds evidence of a segment, was changed: {what}; what it proves is proven anew")
