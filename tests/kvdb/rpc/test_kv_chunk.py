"""An import chunk is written and read as the generated classes do it."""

from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb.errors import DtypeError, InvalidArgument, KvdbError, ShapeError
from kvdb.rpc import codec, kv_chunk
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.kv_chunk import Chunk

DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)]
LAYERS = st.integers(-(2**63), 2**63 - 1)


@st.composite
def chunks(draw):
    """Views into larger arrays, as an import cuts them: along tokens, sometimes of arrays that do not lie row by row."""
    dtype = draw(st.sampled_from(DTYPES))
    heads, tokens, head_dim = draw(st.integers(0, 4)), draw(st.integers(0, 40)), draw(st.integers(0, 24))
    start, end = sorted((draw(st.integers(0, tokens)), draw(st.integers(0, tokens))))
    order = draw(st.permutations(range(3)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    whole = rng.standard_normal((2, heads, tokens, head_dim)).astype(dtype)
    k, v = (np.ascontiguousarray(half.transpose(order)).transpose(np.argsort(order))[:, start:end] for half in whole)
    return Chunk(draw(LAYERS), k, v)


def generated(given):
    """The same request in the generated classes."""
    head = pb.KvChunk(layer=given.layer, dtype=codec.to_array(given.k).dtype, shape=given.k.shape)
    return pb.ImportRequest(chunk=head, data=given.k.tobytes() + given.v.tobytes())


def assert_same(back, given):
    assert back.layer == given.layer
    for one, other in ((back.k, given.k), (back.v, given.v)):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


@given(chunks())
def test_the_generated_class_reads_what_is_written_by_hand(given):
    assert pb.ImportRequest.FromString(kv_chunk.serialize(given)) == generated(given)


@given(chunks())
def test_what_the_generated_class_writes_is_read_by_hand(given):
    assert_same(kv_chunk.deserialize(generated(given).SerializeToString()), given)


@given(chunks())
def test_both_by_hand(given):
    assert_same(kv_chunk.deserialize(kv_chunk.serialize(given)), given)


def test_a_chunk_is_read_in_place():
    given = Chunk(1, np.ones((2, 4096, 8), np.float32), np.ones((2, 4096, 8), np.float32))
    data = kv_chunk.serialize(given)
    back = kv_chunk.deserialize(data)
    assert np.shares_memory(back.k, np.frombuffer(data, np.uint8))
    assert not back.k.flags.writeable


@pytest.mark.parametrize("step", ["begin", "commit"])
def test_other_steps_are_the_generated_messages(step):
    request = pb.ImportRequest()
    getattr(request, step).SetInParent()
    assert kv_chunk.deserialize(kv_chunk.serialize(request)) == request


OTHER_WAYS = {
    "the data first": lambda head, data: data + head,
    "the header in two": lambda head, data: b"\x12\x02\x08\x01" + head + data,
    "the data twice": lambda head, data: head + data + data,
    "a long length": lambda head, data: head[:1] + bytes([head[1] | 0x80, 0]) + head[2:] + data,
    "a field of later days": lambda head, data: head + data + b"\xf8\x07\x01",
    "a field of four bytes": lambda head, data: head + b"\xfd\x07abcd" + data,
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_other_ways_to_write_a_chunk_are_read_as_protobuf_reads_them(way):
    given = Chunk(3, np.ones((1, 2, 8), np.float32), np.zeros((1, 2, 8), np.float32))
    request = generated(given)
    head, data = (
        part.SerializeToString() for part in (pb.ImportRequest(chunk=request.chunk), pb.ImportRequest(data=request.data))
    )
    raw = OTHER_WAYS[way](head, data)
    assert pb.ImportRequest.FromString(raw).chunk.layer == 3
    assert_same(kv_chunk.deserialize(raw), given)


@given(st.binary(max_size=60))
def test_garbage_is_refused_or_read_as_protobuf_reads_it(data):
    try:
        back = kv_chunk.deserialize(data)
    except KvdbError:
        return
    parsed = pb.ImportRequest.FromString(data)
    assert back == parsed if isinstance(back, pb.ImportRequest) else back.layer == parsed.chunk.layer


@given(chunks(), st.data())
def test_a_damaged_chunk_is_never_a_crash(given, data):
    raw = bytearray(kv_chunk.serialize(given))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, min(len(raw), 60) - 1))] = data.draw(st.integers(0, 255))
    with suppress(KvdbError):
        kv_chunk.deserialize(bytes(raw))


def test_bytes_that_are_no_message():
    with pytest.raises(InvalidArgument, match="no ImportRequest"):
        kv_chunk.deserialize(b"\xff\xff\xff")
    with pytest.raises(DtypeError, match="''"):
        kv_chunk.deserialize(pb.ImportRequest(chunk=pb.KvChunk()).SerializeToString())
    lying = pb.KvChunk(dtype="float32", shape=[3])
    with pytest.raises(ShapeError, match="2 bytes"):
        kv_chunk.deserialize(pb.ImportRequest(chunk=lying, data=b"1234").SerializeToString())
