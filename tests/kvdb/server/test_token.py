"""Who brings no token is told so, and learns nothing else."""

import grpc
import pytest

import kvdb
from kvdb import errors
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.calls import Stub


@pytest.fixture
def target(serve):
    return serve(token="geheim", reflection=True).target


def test_the_right_token(target, spec, make_kv):
    kv = make_kv(spec, 70)
    with kvdb.connect(target, token="geheim") as db:
        db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        with db.create_session(spec, kv.tokens) as session:
            assert session.reused == 70
            assert session.attention(0, kv.q[0]).shape == (4, 70, 16)


@pytest.mark.parametrize("token", ["", "geheim2", "Geheim", "x" * 5000])
def test_a_wrong_token(target, token):
    with pytest.raises(errors.Unauthenticated, match=r"pass the server's with connect\(\.\.\., token="):
        kvdb.connect(target, token=token)


def test_every_call_wants_the_token(stub):
    calls = {
        "Hello": (stub.Hello, pb.HelloRequest()),
        "ListContexts": (stub.ListContexts, pb.ListContextsRequest()),
        "CreateSession": (stub.CreateSession, pb.CreateSessionRequest()),
        "Decode": (lambda request: list(stub.Decode(iter([request]))), pb.DecodeRequest()),
        "ImportContext": (lambda request: list(stub.ImportContext(iter([request]))), pb.ImportRequest()),
    }
    for call, request in calls.values():
        with pytest.raises(grpc.RpcError) as raised:
            call(request)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_another_scheme_is_no_token(target):
    with grpc.insecure_channel(target.removeprefix("kvdb://")) as channel:
        for value in ("geheim", "Basic geheim", "bearer geheim"):
            with pytest.raises(grpc.RpcError) as raised:
                Stub(channel).Hello(pb.HelloRequest(), metadata=(("authorization", value),))
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_token_that_no_header_carries():
    for token in ("schlüssel", "a\nb"):
        with pytest.raises(errors.InvalidArgument, match="printable ASCII"):
            kvdb.connect("kvdb://127.0.0.1:1", token=token)
