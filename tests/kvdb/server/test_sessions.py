"""Sessions on the server: how they end, how many there may be, and the calls that the SDK does not make."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

import kvdb
from kvdb import errors
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb


def ones(heads, n=1):
    return np.ones((heads, n, 16), np.float32)


def create(stub, spec, tokens=(1, 2, 3)):
    ids = codec.to_tokens(np.array(tokens, np.int32))
    return stub.CreateSession(pb.CreateSessionRequest(spec=codec.to_spec(spec), tokens=ids)).session_id


def test_a_session_that_nobody_uses_is_closed(serve, spec, blocks_used, eventually):
    server = serve(session_idle_seconds=0.2)
    with kvdb.connect(server.target) as db:
        session = db.create_session(spec, [1])
        session.update(0, ones(2), ones(2))
        eventually(lambda: not blocks_used())
        for call in (lambda: session.attend(0, ones(4), ones(2), ones(2)), session.stats, session.fork):
            with pytest.raises(errors.SessionClosed, match=r"nobody used it for 0\.2 s; open another with create_session"):
                call()
        session.close()


def test_a_session_in_use_is_not_idle(serve, spec):
    server = serve(session_idle_seconds=0.3)
    with kvdb.connect(server.target) as db, db.create_session(spec, [1]) as session:
        pause = threading.Event()
        for _ in range(8):
            session.attend(0, ones(4), ones(2), ones(2))
            pause.wait(0.1)
        assert session.stats().queries == 8


def test_ids_cannot_be_guessed(stub, spec):
    names = {create(stub, spec) for _ in range(20)}
    assert len(names) == 20
    assert all(len(name) >= 22 for name in names)
    with pytest.raises(grpc.RpcError) as raised:
        stub.Stats(pb.StatsRequest(session_id="0"))
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_the_unary_calls_answer_as_the_stream_does(stub, spec, make_kv):
    kv = make_kv(spec, 70)
    q, k, v = map(codec.to_array, (kv.q[1], *kv.pairs()[1]))
    apart, together, streamed = (create(stub, spec) for _ in range(3))
    stub.Update(pb.UpdateRequest(session_id=apart, layer=1, k=k, v=v, start=0))
    out = stub.Attention(pb.AttentionRequest(session_id=apart, layer=1, q=q)).out
    assert out == stub.Attend(pb.AttendRequest(session_id=together, layer=1, q=q, k=k, v=v, start=0)).out
    requests = [
        pb.DecodeRequest(update=pb.UpdateRequest(session_id=streamed, layer=1, k=k, v=v)),
        pb.DecodeRequest(attention=pb.AttentionRequest(layer=1, q=q)),
    ]
    replies = list(stub.Decode(iter(requests)))
    assert not replies[0].HasField("out")
    assert replies[1].out == out
    assert stub.CloseSession(pb.CloseSessionRequest(session_id=apart)) == pb.CloseSessionReply()
    assert stub.CloseSession(pb.CloseSessionRequest(session_id=apart)) == pb.CloseSessionReply()


def test_a_stream_carries_one_session(stub, spec):
    one, other = create(stub, spec), create(stub, spec)
    k = codec.to_array(ones(2))
    requests = [pb.DecodeRequest(update=pb.UpdateRequest(session_id=name, layer=0, k=k, v=k)) for name in (one, other)]
    replies = stub.Decode(iter(requests))
    next(replies)
    with pytest.raises(grpc.RpcError) as raised:
        next(replies)
    assert "another session" in raised.value.details()
    with pytest.raises(grpc.RpcError) as raised:
        next(stub.Decode(iter([pb.DecodeRequest()])))
    assert "holds no call" in raised.value.details()


def test_a_position_that_no_message_can_carry(client, spec):
    with (
        client.create_session(spec, [1]) as session,
        pytest.raises(errors.PositionError, match="start is 1180591620717411303424"),
    ):
        session.update(0, ones(2), ones(2), start=1 << 70)


def test_more_streams_than_workers_are_refused_and_the_rest_is_served(serve, spec):
    server = serve(workers=2)
    with kvdb.connect(server.target) as db:
        first, second, third = (db.create_session(spec, [1]) for _ in range(3))
        first.update(0, ones(2), ones(2))
        second.update(0, ones(2), ones(2))
        with pytest.raises(errors.CapacityError, match=r"2 streams.*raise server\.workers"):
            third.update(0, ones(2), ones(2))
        with pytest.raises(errors.CapacityError):
            db.import_context(spec, [1], [(ones(2), ones(2))] * 2, name="doc")
        assert third.stats().tokens == 0
        first.close()
        third.update(0, ones(2), ones(2))


def test_many_threads_share_a_client_and_a_session(client, spec):
    with client.create_session(spec, [1]) as shared:

        def work(_):
            with client.create_session(spec, [1]) as mine:
                for _ in range(20):
                    shared.attend(0, ones(4), ones(2), ones(2))
                    mine.attend(0, ones(4), ones(2), ones(2))
                return mine.stats().queries

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, range(8))) == [20] * 8
        assert shared.stats().queries == 160


def test_closing_the_client_closes_its_sessions(serve, spec, blocks_used):
    server = serve()
    db = kvdb.connect(server.target)
    session = db.create_session(spec, [1])
    twin = session.fork()
    twin.update(0, ones(2), ones(2))
    db.close()
    db.close()
    assert not blocks_used()
    for handle in (session, twin):
        handle.close()
        with pytest.raises(errors.SessionClosed):
            handle.stats()
    with pytest.raises(errors.Unavailable, match="connect again"):
        db.contexts()
