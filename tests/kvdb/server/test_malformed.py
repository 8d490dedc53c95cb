"""Messages that no client of ours sends: each ends with a status that says what is wrong with it, never as a bug."""

import tracemalloc

import grpc
import numpy as np
import pytest

from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb

MOST = (1 << 64) - 1
BUGS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
SHAPES = [[], [0], [MOST, 0, 16], [1 << 32, 1 << 32, 0], [2, 1, 16, 1, 1, 1, 1, 1, 1], [3, 1, 16]]
DTYPES = ["float32", "object", "complex128", "V16", "x" * 10_000]
SPECS = [
    {"layers": 1 << 40},
    {"layers": MOST},
    {"q_heads": 1 << 63, "kv_heads": 1 << 63},
    {"head_dim": MOST},
    {"dtype": "object"},
    {"name": "x" * 100_000},
    {"fingerprint": "x" * 100_000},
    {"scale": float("nan")},
    {"rope": pb.Rope(theta=float("inf"), layout="half")},
    {"rope": pb.Rope(theta=1e4, layout="half", rotary_dims=1 << 63)},
]
SCALINGS = [
    "{",
    "[1]",
    "null",
    '{"a":' * 5000 + "1" + "}" * 5000,
    '{"a": {"b": 1}}',
    '{"a": [1, {"c": {}}]}',
    "[" * 90_000,
]


@pytest.fixture
def small(spec):
    return codec.to_spec(spec)


@pytest.fixture
def session(stub, small):
    return stub.CreateSession(pb.CreateSessionRequest(spec=small)).session_id


def code_of(call, *arguments):
    with pytest.raises(grpc.RpcError) as raised:
        call(*arguments, timeout=20)
    return raised.value.code()


@pytest.mark.parametrize("fields", SPECS, ids=range(len(SPECS)))
def test_a_spec_that_cannot_be(stub, small, fields):
    wrong = pb.ModelSpec(name="m", layers=1, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")
    wrong.MergeFrom(pb.ModelSpec(**fields))
    assert code_of(stub.CreateSession, pb.CreateSessionRequest(spec=wrong)) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("scaling", SCALINGS, ids=range(len(SCALINGS)))
def test_scaling_that_is_no_plain_object(stub, small, scaling):
    small.rope.CopyFrom(pb.Rope(theta=1e4, layout="half", scaling=scaling))
    assert code_of(stub.CreateSession, pb.CreateSessionRequest(spec=small)) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype[:10])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_array_that_cannot_be(stub, session, shape, dtype):
    array = pb.Array(dtype=dtype, shape=shape)
    one = {"session_id": session, "layer": 0}
    several = {"session_ids": [session], "layer": 0}
    for call, request in (
        ("Update", pb.UpdateRequest(**one, k=array, v=array)),
        ("Attention", pb.AttentionRequest(**one, q=array)),
        ("Attend", pb.AttendRequest(**one, q=array, k=array, v=array)),
        ("AttentionTogether", pb.AttentionTogetherRequest(**several, q=array)),
        ("AttendTogether", pb.AttendTogetherRequest(**several, q=array, k=array, v=array)),
    ):
        assert code_of(getattr(stub, call), request) is grpc.StatusCode.INVALID_ARGUMENT, call


def ended(call):
    """How a call ends."""
    try:
        call()
    except grpc.RpcError as failure:
        return failure.code()
    return grpc.StatusCode.OK


LIES_BYTES_MAX = 6 << 20
"""What a call may take beside its message, of which client and server have copies here."""


@pytest.fixture
def lies(session, small):
    """Requests that claim to be huge, by the name of their call."""
    huge = pb.Array(dtype="float32", shape=[1 << 20, 1 << 20, 1 << 12])
    one, several = {"session_id": session, "layer": 0}, {"session_ids": [session], "layer": 0}
    most = pb.ModelSpec(name="m", layers=4096, q_heads=4096, kv_heads=4096, head_dim=4096, dtype="float32")
    return {
        "Update": pb.UpdateRequest(**one, k=huge, v=huge),
        "Attention": pb.AttentionRequest(**one, q=huge),
        "Attend": pb.AttendRequest(**one, q=huge, k=huge, v=huge),
        "AttendTogether": pb.AttendTogetherRequest(**several, q=huge, k=huge, v=huge),
        "AttentionTogether": pb.AttentionTogetherRequest(**several, q=huge),
        "UpdateSessions": pb.UpdateSessionsRequest(**several, k=huge, v=huge),
        "TruncateSessions": pb.TruncateSessionsRequest(session_ids=[session] * 3, tokens=[0]),
        "CloseSessions": pb.CloseSessionsRequest(session_ids=["absent"] * 20_000),
        "Truncate": pb.TruncateRequest(session_id=session, tokens=MOST),
        "CreateSession": pb.CreateSessionRequest(spec=most),
        "CreateSessions": pb.CreateSessionsRequest(sessions=[pb.CreateSessionRequest(spec=small, tokens=b"123")] * 1000),
        "MatchPrefix": pb.MatchPrefixRequest(spec=most, tokens=bytes(1 << 20)),
        "ContextTokens": pb.ContextTokensRequest(name="absent", start=MOST),
        "DropContexts": pb.DropContextsRequest(names=pb.Names(names=["absent"] * 20_000)),
        "UpdateContext": pb.UpdateContextRequest(name="absent", shared_with=pb.Names(names=["t"] * 20_000)),
        "ListContexts": pb.ListContextsRequest(limit=MOST),
        "Explain": pb.ExplainRequest(session_id=session, layer=MOST >> 1),
    }


def test_what_claims_to_be_huge_takes_no_memory(stub, channel, session, lies):
    read = pb.ReadContextRequest(session_id=session, layers=range(5000), start=0, stop=1 << 60)
    calls = {name: lambda name=name, request=request: getattr(stub, name)(request, timeout=20) for name, request in lies.items()}
    calls["ReadContext"] = lambda: list(stub.ReadContext(read, timeout=20))
    tracemalloc.start()
    try:
        for name, call in calls.items():
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            assert ended(call) not in BUGS, name
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < LIES_BYTES_MAX, (name, peak)
    finally:
        tracemalloc.stop()


def test_bytes_that_are_no_message(channel):
    for call in ("Hello", "CreateSession", "Attention", "BuildIndex"):
        raw = channel.unary_unary(f"/kvdb.v1.Kvdb/{call}")
        assert code_of(raw, b"\xff" * 10) is grpc.StatusCode.INVALID_ARGUMENT
    decode = channel.stream_stream("/kvdb.v1.Kvdb/Decode")
    with pytest.raises(grpc.RpcError) as raised:
        next(decode(iter([b"\xff" * 10])))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_messages_with_wrong_bytes_are_never_a_bug(channel, session, small):
    q = codec.to_array(np.ones((4, 1, 16), np.float32))
    k = codec.to_array(np.ones((2, 1, 16), np.float32))
    options = pb.QueryOptions(retrieval=pb.Retrieval(dipr=pb.Retrieval.Dipr(alpha=0.1)), hints=pb.Hints(index="flat"))
    seeds = {
        "CreateSession": pb.CreateSessionRequest(spec=small, tokens=b"\1\0\0\0"),
        "Attend": pb.AttendRequest(session_id=session, q=q, k=k, v=k, options=options),
        "Store": pb.StoreRequest(session_id=session, name="doc", tokens=b"\1\0\0\0"),
        "Explain": pb.ExplainRequest(session_id=session, options=options),
    }
    rng = np.random.default_rng(1)
    for name, message in seeds.items():
        call = channel.unary_unary(f"/kvdb.v1.Kvdb/{name}")
        for _ in range(60):
            raw = bytearray(message.SerializeToString())
            for at in rng.integers(0, min(len(raw), 70), rng.integers(1, 4)):
                raw[at] = rng.integers(0, 256)
            failure = call.future(bytes(raw), timeout=20).exception()
            assert failure is None or failure.code() not in BUGS, (name, bytes(raw), failure.details())


def test_explain_of_a_layer_that_was_emptied(stub, spec):
    """Its last query is of tokens that are gone."""
    small = codec.to_spec(spec)
    session = stub.CreateSession(pb.CreateSessionRequest(spec=small)).session_id
    q, k = codec.to_array(np.ones((4, 1, 16), np.float32)), codec.to_array(np.ones((2, 1, 16), np.float32))
    stub.Attend(pb.AttendRequest(session_id=session, layer=0, q=q, k=k, v=k))
    stub.Truncate(pb.TruncateRequest(session_id=session, tokens=0))
    code = code_of(stub.Explain, pb.ExplainRequest(session_id=session, layer=0, analyze=True))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
