"""What goes onto the wire comes off it as it was."""

import string

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvdb.errors import DtypeError, InvalidArgument, ShapeError, SpecError
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.calls import OF_METHOD, OF_SESSION
from kvdb.types import (
    ERROR,
    HEADS_TOTAL_MAX,
    LAYERS_MAX,
    MEASURES,
    ContextInfo,
    ContextStatistics,
    IndexInfo,
    ModelSpec,
    Placed,
    PromptPart,
    Rope,
    SegmentStatistics,
    SessionStats,
)

DTYPES = [np.dtype(ml_dtypes.bfloat16), *map(np.dtype, ("float16", "float32", "float64", "int8", "int64", "uint16", "bool"))]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5)
COUNTS = st.integers(1, 2**40)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALING = st.dictionaries(st.text(), st.one_of(st.integers(), FINITE, st.text(), st.booleans(), st.lists(FINITE)), max_size=4)
ROPES = st.builds(
    Rope,
    theta=st.floats(1e-3, 1e9),
    rotary_dims=st.none() | st.just(8),
    layout=st.sampled_from(["half", "interleaved"]),
    scaling=SCALING,
)


@st.composite
def arrays(draw):
    """Bits of any kind: NaNs with their payload too."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8).view(dtype).reshape(shape)


@st.composite
def specs(draw):
    kv_heads, group = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    return ModelSpec(
        name=draw(st.text()),
        layers=draw(st.integers(1, min(LAYERS_MAX, HEADS_TOTAL_MAX // (kv_heads * group)))),
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=8 * draw(st.integers(1, 32)),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        rope=draw(st.none() | ROPES),
        fingerprint=draw(st.text()),
        scale=draw(st.none() | st.floats(1e-6, 1e6)),
    )


def sent(message):
    """The message as the other side parses it."""
    return type(message).FromString(message.SerializeToString())


@given(arrays())
def test_arrays(array):
    back = codec.from_array(sent(codec.to_array(array)))
    assert back.shape == array.shape
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


@given(specs())
def test_specs_keep_their_digest(spec):
    assert codec.from_spec(sent(codec.to_spec(spec))).digest == spec.digest


@given(hnp.arrays(np.int32, st.integers(0, 50)))
def test_tokens(tokens):
    assert codec.from_tokens(codec.to_tokens(tokens)).tolist() == tokens.tolist()


@given(hnp.arrays(np.int64, st.integers(0, 50)))
def test_positions(positions):
    back = codec.from_positions(codec.to_positions(positions))
    assert back.dtype == np.int64
    assert back.tolist() == positions.tolist()


@given(
    st.text() | hnp.arrays(np.int32, st.integers(0, 5)),
    st.none() | st.integers(-(2**53), 2**53),
    st.none() | st.integers(-(2**53), 2**53),
)
def test_parts(source, visible, at):
    back = codec.from_part(sent(codec.to_part(PromptPart(source, visible, at))))
    assert (back.visible, back.at) == (visible, at)
    assert type(back.source) is type(source)
    assert np.array_equal(back.source, source)


@given(COUNTS, COUNTS, st.text())
def test_what_is_placed(begin, end, kind):
    assert codec.from_placed(sent(codec.to_placed(Placed(begin, end, kind)))) == Placed(begin, end, kind)


@given(specs(), st.text(), COUNTS, st.booleans(), st.booleans())
def test_infos(spec, name, count, chunk, blended):
    info = ContextInfo(name, spec, count, count + 1, count + 2, chunk, blended)
    assert codec.from_info(sent(codec.to_info(info))) == info


@given(COUNTS, st.text(), FINITE)
def test_index_infos(count, text, seconds):
    info = IndexInfo(count, count + 1, text, 2, 3, count + 4, text[1:], 0.3, seconds, -seconds, text[2:])
    call = OF_METHOD["indexes"]
    assert call.value(sent(call.reply([info, info]))) == [info, info]


COUNTERS = st.dictionaries(st.text(string.ascii_letters), st.integers(0, 2**63))


@given(COUNTS, FINITE, COUNTERS, COUNTERS)
def test_stats(count, seconds, rules, ways):
    stats = SessionStats(count, 1, 2, 3, 4, 5, 6, 7, seconds, 0.25, 0.5, 0.75, rules, count, 0.1, seconds, 0.3, ways)
    call = OF_SESSION["stats"]
    assert call.value(sent(call.reply(stats))) == stats


@given(COUNTS, hnp.arrays(np.int64, (2, 2, 3)), hnp.arrays(np.float32, (5, 2, 3)))
def test_statistics(count, counted, measured):
    *averages, error = measured
    queries, audits = counted
    segment = SegmentStatistics(count, count + 1, queries, *averages, audits, error)
    statistics = ContextStatistics("doc", (segment, segment))
    back = codec.from_statistics(sent(codec.to_statistics(statistics)))
    assert len(back.segments) == 2
    for one in back.segments:
        assert (one.segment, one.tokens) == (count, count + 1)
        for name in ("queries", *MEASURES, "audits", ERROR):
            array, expected = getattr(one, name), getattr(segment, name)
            assert (array.dtype, array.shape, array.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def test_arrays_that_do_not_fit_together():
    with pytest.raises(ShapeError, match="10 bytes"):
        codec.from_array(pb.Array(dtype="float32", shape=[3], data=b"x" * 10))
    with pytest.raises(ShapeError):
        codec.from_array(pb.Array(dtype="float32", shape=[1 << 63, 1 << 63], data=b""))
    with pytest.raises(ShapeError):
        codec.from_array(pb.Array(dtype="int8", shape=[1] * 70, data=b"x"))
    with pytest.raises(DtypeError, match="'object'"):
        codec.from_array(pb.Array(dtype="object", shape=[1], data=b"x" * 8))
    for foreign in (np.zeros(2, ">f4"), np.array([None]), np.zeros(2, "U3")):
        with pytest.raises(DtypeError, match="expected float32"):
            codec.to_array(foreign)


def test_values_that_cannot_be():
    with pytest.raises(InvalidArgument, match="3 bytes"):
        codec.from_tokens(b"123")
    with pytest.raises(InvalidArgument, match="12 bytes; expected a multiple of 8"):
        codec.from_positions(b"x" * 12)
    with pytest.raises(InvalidArgument, match="names no context and holds no tokens"):
        codec.from_part(pb.Part(visible=1))
    with pytest.raises(SpecError, match="layers"):
        codec.from_spec(pb.ModelSpec())
    good = codec.to_spec(ModelSpec("m", 1, 1, 1, 8))
    for scaling in ("{", "[1]"):
        good.rope.CopyFrom(pb.Rope(theta=1.0, layout="half", scaling=scaling))
        with pytest.raises(SpecError, match="JSON object"):
            codec.from_spec(good)
