"""The file of an index: magic, version, a JSON header, raw arrays, and a CRC-32 of everything before it.

Layout, little-endian: magic, 8 bytes; length of the header, uint64; the header, JSON in UTF-8: version, kind, the index's own
fields, and the name, dtype and shape of each array; then each array, C-contiguous, from the next multiple of 64 bytes on; last
the CRC-32 of all of that, uint32. A file is written under another name and then renamed, so that a file of its own name is always
whole.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from indexes.base import Ask, IndexCorrupt, unlimited
from indexes.blocks import Blocks

Array = npt.NDArray[Any]
Shapes = Mapping[str, tuple[tuple[int, ...], type[np.generic]]]
"""The shape and dtype of each array of an index, by the array's name."""

MAGIC = b"KVDBIDX\n"
VERSION = 1
ALIGNMENT = 64
DTYPES = {code: np.dtype(f"<{code}") for code in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")}
"""The dtypes that an array may have, by their names in a header. bfloat16 is stored as uint16."""


def write(path: Path, kind: str, header: Mapping[str, object], arrays: Mapping[str, Array], ask: Ask = unlimited) -> None:
    """Write an index of this kind, in place of any file at `path`. header: JSON values. ask: is told the bytes of the file before
    any is written. Raises OSError, ValueError for another dtype, and what `ask` does."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    directory = [[name, _dtype_name(name, array), list(np.shape(arrays[name]))] for name, array in contiguous.items()]
    fields = {"version": VERSION, "kind": kind, "header": dict(header), "arrays": directory}
    text = json.dumps(fields, allow_nan=False).encode()
    nbytes = len(MAGIC) + 8 + len(text)
    for array in contiguous.values():
        nbytes += -nbytes % ALIGNMENT + array.nbytes
    ask(nbytes + 4)
    temporary = NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False)  # noqa: SIM115, renamed below
    try:
        with temporary as file:
            out = _Summed(file)
            out.write(MAGIC + len(text).to_bytes(8, "little") + text)
            for array in contiguous.values():
                out.write(bytes(-out.length % ALIGNMENT))
                out.write(array.reshape(-1).view(np.uint8).data if array.size else b"")
            file.write(out.sum.to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary.name, path)
    except BaseException:
        os.unlink(temporary.name)
        raise


def read(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """The header and arrays that `write` wrote; the arrays are writable copies. Raises IndexCorrupt, or OSError."""
    size = path.stat().st_size
    content = np.empty(size, np.uint8)
    with path.open("rb") as file:
        if file.readinto(content.data) != size:
            raise IndexCorrupt(f"{path} changed while it was read; expected a file that nobody writes")
    start = len(MAGIC) + 8
    if size < start + 4 or content[: len(MAGIC)].tobytes() != MAGIC:
        raise IndexCorrupt(f"{path} is no index file; expected one that begins with {MAGIC!r}")
    if zlib.crc32(content[:-4].data) != int.from_bytes(content[-4:].tobytes(), "little"):
        raise IndexCorrupt(f"{path} does not match its checksum; it was cut short or changed: build the index again")
    text_end = start + int.from_bytes(content[len(MAGIC) : start].tobytes(), "little")
    try:
        fields = json.loads(content[start:text_end].tobytes())
        version, found_kind, header, directory = (fields[name] for name in ("version", "kind", "header", "arrays"))
        if version != VERSION or found_kind != kind:
            raise IndexCorrupt(f"{path} is a {found_kind!r} of version {version}; expected a {kind!r} of version {VERSION}")
        if not isinstance(header, dict):
            raise TypeError("header")
        return header, _cut(content[:-4], text_end, directory)
    except IndexCorrupt:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise IndexCorrupt(f"{path} has a header that cannot be read ({error!r}); build the index again") from error


def check_blocks(path: Path, header: Mapping[str, Any], blocks: Blocks) -> None:
    """Raises IndexCorrupt unless the header's "blocks" are the identity of these."""
    found, expected = header.get("blocks"), blocks.identity()
    if found != expected:
        raise IndexCorrupt(f"{path} is an index of other keys, {found}; expected {expected}: build the index again")


def checked_arrays(path: Path, arrays: Mapping[str, Array], expected: Shapes, prefix: str = "") -> dict[str, Array]:
    """The arrays that `expected` names; in the file, `prefix` stands before each name. Raises IndexCorrupt unless every array is
    there, with its shape and dtype."""
    for name, (shape, dtype) in expected.items():
        found = arrays.get(prefix + name)
        if found is None or (found.shape, found.dtype) != (shape, np.dtype(dtype)):
            held = "none" if found is None else f"{found.dtype} {found.shape}"
            raise IndexCorrupt(
                f"{path} holds {held} as {prefix + name}; expected {np.dtype(dtype)} {shape}: build the index again"
            )
    return {name: arrays[prefix + name] for name in expected}


def _dtype_name(name: str, array: Array) -> str:
    for known, dtype in DTYPES.items():
        if array.dtype == dtype:
            return known
    raise ValueError(f"array {name!r} holds {array.dtype}; expected one of {', '.join(DTYPES)}")


def _cut(content: npt.NDArray[np.uint8], at: int, directory: list[tuple[str, str, list[Any]]]) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for name, dtype_name, shape in directory:
        if any(not isinstance(dim, int) or dim < 0 for dim in shape):
            raise ValueError(f"shape of {name!r}")
        at += -at % ALIGNMENT
        dtype = DTYPES[dtype_name]
        count = 1
        for dim in shape:
            count *= dim
        if count * dtype.itemsize > len(content) - at:
            raise ValueError(f"length of {name!r}")
        end = at + count * dtype.itemsize
        arrays[name] = np.array(content[at:end]).view(dtype).reshape(shape)
        at = end
    if at != len(content):
        raise ValueError("length of the arrays")
    return arrays


class _Summed:
    """Writes to a file, and keeps the number of bytes and their CRC-32."""

    def __init__(self, file: BinaryIO | Any) -> None:
        self._file = file
        self.sum = 0
        self.length = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.sum = zlib.crc32(data, self.sum)
        self.length += len(data)
