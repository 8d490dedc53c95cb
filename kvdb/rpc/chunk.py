"""Import chunks on the wire without the copies that the generated classes make of their data.

An import is memory traffic, and protobuf's Python classes copy a chunk three times on each side. Here its data is gathered
from the caller's arrays straight into the message, once, and read from it in place. The bytes are those of the generated
`ImportRequest` (https://protobuf.dev/programming-guides/encoding): what is written here is read by it, and the other way
round; an encoding that this file does not expect is left to the generated class.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from kvdb.errors import InvalidArgument
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.codec import build_array, from_array, put_head
from kvdb.types import Array

_VARINT, _BYTES = 0, 2

Piece = bytes | memoryview


@dataclass(frozen=True, eq=False)
class Chunk:
    """KV of the next tokens of one layer: k and v, `[kv_heads, n, head_dim]`."""

    layer: int
    k: Array
    v: Array


def serialize(request: "Chunk | pb.ImportRequest") -> bytes:
    """The bytes of an `ImportRequest`. Raises DtypeError for a chunk whose dtype does not travel."""
    if isinstance(request, pb.ImportRequest):
        return request.SerializeToString()
    parts: list[Piece] = [pb.ImportChunk(layer=request.layer).SerializeToString()]
    parts += _field(pb.ImportChunk.K_FIELD_NUMBER, _array(request.k))
    parts += _field(pb.ImportChunk.V_FIELD_NUMBER, _array(request.v))
    return b"".join(_field(pb.ImportRequest.CHUNK_FIELD_NUMBER, parts))


def deserialize(data: bytes) -> "Chunk | pb.ImportRequest":
    """A chunk over `data`, or whatever else an import sends. Raises InvalidArgument, DtypeError or ShapeError."""
    try:
        step = _only(memoryview(data))
        if step.keys() == {pb.ImportRequest.CHUNK_FIELD_NUMBER}:
            chunk = _only(_view(step[pb.ImportRequest.CHUNK_FIELD_NUMBER]))
            layer = chunk.pop(pb.ImportChunk.LAYER_FIELD_NUMBER, 0)
            if chunk.keys() == {pb.ImportChunk.K_FIELD_NUMBER, pb.ImportChunk.V_FIELD_NUMBER} and isinstance(layer, int):
                k, v = (_build(_only(_view(chunk[field]))) for field in sorted(chunk))
                return Chunk(layer - (1 << 64) if layer >> 63 else layer, k, v)
    except _Unexpected:
        pass
    return _generated(data)


class _Unexpected(Exception):
    """Bytes that are no protobuf, or a way to write it that generated code alone has to know."""


def _generated(data: bytes) -> "Chunk | pb.ImportRequest":
    try:
        request = pb.ImportRequest.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"a message of {len(data)} bytes is no ImportRequest: {error}") from None
    if request.WhichOneof("step") != "chunk":
        return request
    return Chunk(request.chunk.layer, from_array(request.chunk.k), from_array(request.chunk.v))


def _array(array: Array) -> list[Piece]:
    """An `Array` in pieces; the data row by row, so that a range of tokens need not be copied together first."""
    head = pb.Array()
    put_head(head, array)
    rows = [_raw(array)] if array.flags.c_contiguous else [_raw(row) for row in array]
    return [head.SerializeToString(), *_field(pb.Array.DATA_FIELD_NUMBER, rows)]


def _raw(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _field(number: int, parts: Sequence[Piece]) -> list[Piece]:
    """One length-delimited field whose content is `parts`."""
    length = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
    return [_varint(number << 3 | _BYTES) + _varint(length), *parts]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _only(message: memoryview) -> dict[int, int | memoryview]:
    """The fields of a message by number, each of which stands there once."""
    fields: dict[int, int | memoryview] = {}
    for number, value in _fields(message):
        if number in fields:
            raise _Unexpected
        fields[number] = value
    return fields


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    at, end = 0, len(message)
    while at < end:
        tag, at = _read_varint(message, at)
        value, at = _read_varint(message, at)
        if tag & 7 == _BYTES:
            if at + value > end:
                raise _Unexpected
            yield tag >> 3, message[at : at + value]
            at += value
        elif tag & 7 == _VARINT:
            yield tag >> 3, value
        else:
            raise _Unexpected


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80 and value < 1 << 64:
            return value, at
    raise _Unexpected


def _view(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise _Unexpected
    return value


def _build(fields: dict[int, int | memoryview]) -> Array:
    """An `Array` from its fields; the shape is packed, as proto3 writes it."""
    if fields.keys() != {pb.Array.DTYPE_FIELD_NUMBER, pb.Array.SHAPE_FIELD_NUMBER, pb.Array.DATA_FIELD_NUMBER}:
        raise _Unexpected
    packed, shape, at = _view(fields[pb.Array.SHAPE_FIELD_NUMBER]), [], 0
    while at < len(packed):
        length, at = _read_varint(packed, at)
        shape.append(length)
    dtype = bytes(_view(fields[pb.Array.DTYPE_FIELD_NUMBER]))
    if not dtype.isascii():
        raise _Unexpected
    return build_array(dtype.decode(), tuple(shape), _view(fields[pb.Array.DATA_FIELD_NUMBER]))
