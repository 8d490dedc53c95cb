"""Chunks of KV on the wire, in either direction: a generated header, and the raw bytes of the arrays behind it.

Imports and reads are memory traffic, and protobuf's Python classes copy the data of a message three times on each side. Here the
data is copied once, from the caller's arrays straight into the message, and read in place. The bytes are those of an
`ImportRequest` and of a `ReadReply`, as https://protobuf.dev/programming-guides/encoding defines them: the header, then the
field `data`. A message that is written in another way is parsed by the generated class.
"""

import math
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from kvdb.errors import InvalidArgument
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.codec import build_array, put_head, wire_dtype
from kvdb.types import Array

CHUNK_BYTES = 1 << 20
"""About how large the data of a chunk is."""
_BYTES = 2  # the wire type of a field that begins with its length
_CHUNK_TAG = pb.ImportRequest.CHUNK_FIELD_NUMBER << 3 | _BYTES
_DATA_TAG = pb.ImportRequest.DATA_FIELD_NUMBER << 3 | _BYTES


@dataclass(frozen=True, eq=False)
class Chunk:
    """KV of the next tokens of one layer: k and v, `[kv_heads, n, head_dim]` each with a last dimension of its own, of one dtype.
    indexer: whether they are keys of the layer's indexer, and v has no numbers. start: the position of the first token, None for
    the next."""

    layer: int
    k: Array
    v: Array
    indexer: bool = False
    start: int | None = None


def serialize(request: "Chunk | pb.ImportRequest") -> bytes:
    """The bytes of an `ImportRequest`. Raises DtypeError for a chunk whose dtype the wire does not carry."""
    if isinstance(request, pb.ImportRequest):
        return request.SerializeToString()
    k, v = request.k, request.v
    assert (k.shape[:-1], k.dtype) == (v.shape[:-1], v.dtype)
    other = None if k.shape == v.shape else v.shape[-1]
    head = pb.ImportRequest(chunk=pb.KvChunk(layer=request.layer, value_dim=other, indexer=request.indexer, start=request.start))
    put_head(head.chunk, k)
    return b"".join([head.SerializeToString(), _data_begin(k.nbytes + v.nbytes), *_rows(k), *_rows(v)])


def deserialize(data: bytes) -> "Chunk | pb.ImportRequest":
    """The chunk, over the bytes of `data`, or another message of an import. Raises InvalidArgument, DtypeError or ShapeError."""
    try:
        chunk = _in_place(data)
        if chunk is not None:
            return chunk
        request = pb.ImportRequest.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"a message of {len(data)} bytes is no ImportRequest: {error}") from None
    return _chunk(request.chunk, memoryview(request.data)) if request.WhichOneof("step") == "chunk" else request


def _in_place(data: bytes) -> Chunk | None:
    """The chunk, if it is written as `serialize` writes it. Raises DecodeError for a broken header."""
    if len(data) < 2 or data[0] != _CHUNK_TAG or data[1] > 127:  # a header is shorter, and its length one byte
        return None
    end = 2 + data[1]
    head = pb.KvChunk.FromString(data[2:end])
    dtype = wire_dtype(head.dtype)
    if dtype is None:
        return None
    nbytes = (math.prod(head.shape) + math.prod(_value_shape(head))) * dtype.itemsize
    begin = _data_begin(nbytes)
    if len(data) != end + len(begin) + nbytes or data[end : end + len(begin)] != begin:
        return None
    return _chunk(head, memoryview(data)[end + len(begin) :])


def _chunk(head: pb.KvChunk, data: memoryview) -> Chunk:
    """Raises DtypeError or ShapeError."""
    shape, values = tuple(head.shape), _value_shape(head)
    dtype = wire_dtype(head.dtype)
    cut = len(data) // 2 if shape == values or dtype is None else math.prod(shape) * dtype.itemsize
    k, v = build_array(head.dtype, shape, data[:cut]), build_array(head.dtype, values, data[cut:])
    return Chunk(head.layer, k, v, head.indexer, head.start if head.HasField("start") else None)


def _value_shape(head: pb.KvChunk) -> tuple[int, ...]:
    """The shape of v."""
    return (*head.shape[:-1], head.value_dim) if head.HasField("value_dim") else tuple(head.shape)


def _data_begin(nbytes: int) -> bytes:
    """The bytes before those of the field `data`: its tag, and its length as a varint."""
    out = bytearray([_DATA_TAG])
    while nbytes > 0x7F:
        out.append(nbytes & 0x7F | 0x80)
        nbytes >>= 7
    out.append(nbytes)
    return bytes(out)


def _rows(array: Array) -> list[memoryview]:
    """The bytes of an array; head by head, so that a range of tokens need not be copied together first."""
    rows = [array] if array.flags.c_contiguous else list(array)
    return [np.ascontiguousarray(row).reshape(-1).view(np.uint8).data for row in rows]
