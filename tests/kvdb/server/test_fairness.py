"""No client keeps the others out: with silent streams, with calls on a busy session, or with messages that wait."""

import threading
from queue import Queue

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvdb
from kvdb import errors
from kvdb.config import MIB, Config, StorageConfig
from kvdb.database import Database
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.server.serve import CLIENT_WAITING_MAX
from tests.waiting import until

SECONDS_MAX = 20


def ones(heads, n=1):
    return np.ones((heads, n, 16), np.float32)


class Gate:
    """A rule that lets no query pass until it is opened, so that its session is busy."""

    name, before = "gate", "exact_asked"

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def when(self, _facts, _part, _heads):
        self.reached.set()
        assert self.opened.wait(SECONDS_MAX)
        return "it is open"


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
def engine(gate):
    database = Database(Config(storage=StorageConfig(arena_bytes=1 << 20)), rules=[gate])
    yield database
    database.check_integrity()
    database.close()


@pytest.fixture
def busy(gate, spec, stub_of):
    """`busy(server)`: the id of a session that is in the middle of a query, of a client of its own."""
    queries = []

    def begin(server):
        stub = stub_of(server)
        session = stub.CreateSession(pb.CreateSessionRequest(spec=codec.to_spec(spec))).session_id
        k, q = codec.to_array(ones(2)), codec.to_array(ones(4))
        stub.Update(pb.UpdateRequest(session_id=session, layer=0, k=k, v=k))
        queries.append(stub.Attention.future(pb.AttentionRequest(session_id=session, layer=0, q=q)))
        assert gate.reached.wait(SECONDS_MAX)
        return session

    yield begin
    gate.opened.set()
    for query in queries:
        assert query.result(SECONDS_MAX).out.shape == [4, 1, 16]


def silence():
    """Requests that never come."""
    threading.Event().wait(SECONDS_MAX)
    yield from ()


def test_a_stream_that_says_nothing_is_ended(serve, stub_of):
    stub = stub_of(serve(stream_idle_seconds=0.1))
    for call in (stub.Decode(silence()), stub.ImportContext(silence())):
        with pytest.raises(grpc.RpcError) as raised:
            next(call)
        assert raised.value.code() is grpc.StatusCode.CANCELLED


def test_an_import_that_falls_silent_leaves_nothing(serve, stub_of, spec, engine, blocks_used):
    def one_chunk():
        begin = pb.ImportBegin(spec=codec.to_spec(spec), tokens=codec.to_tokens(np.arange(4, dtype=np.int32)), name="doc")
        yield pb.ImportRequest(begin=begin)
        yield pb.ImportRequest(chunk=pb.KvChunk(layer=0, dtype="float32", shape=[2, 4, 16]), data=bytes(2 * ones(2, 4).nbytes))
        yield from silence()

    replies = stub_of(serve(stream_idle_seconds=0.1)).ImportContext(one_chunk())
    assert next(replies).HasField("begun")
    with pytest.raises(grpc.RpcError):
        next(replies)
    assert engine.contexts() == []
    until(lambda: not blocks_used())  # the client hears of the end before the server has let go


def test_a_session_outlives_its_stream(serve, spec, gate, eventually):
    """The stream of a session that pauses makes room for others, and is opened again without a word."""
    gate.opened.set()
    server = serve(workers=1, stream_idle_seconds=0.2)
    with kvdb.connect(server.target) as db, kvdb.connect(server.target) as other:
        session, second = db.create_session(spec, [1]), other.create_session(spec, [1])
        session.update(0, ones(2), ones(2))

        def served():
            try:
                second.update(0, ones(2), ones(2))
            except errors.CapacityError:
                return False
            second.close()
            return True

        eventually(served)
        session.attend(0, ones(4), ones(2), ones(2))
        assert session.explain(0).estimate.tokens == 2


def test_one_client_leaves_streams_to_others(serve, spec, gate):
    gate.opened.set()
    server = serve(workers=4)
    with kvdb.connect(server.target) as greedy, kvdb.connect(server.target) as other:
        sessions = [greedy.create_session(spec, [1]) for _ in range(4)]
        for session in sessions[:3]:
            session.update(0, ones(2), ones(2))
        with pytest.raises(errors.CapacityError, match="this client has 3 streams open"):
            sessions[3].update(0, ones(2), ones(2))
        with other.create_session(spec, [1]) as session:
            session.update(0, ones(2), ones(2))


def test_calls_that_wait_for_a_busy_session_take_no_thread(serve, stub_of, busy, gate):
    server = serve(workers=1)
    session, stub = busy(server), stub_of(server)
    waiting = [stub.Stats.future(pb.StatsRequest(session_id=session)) for _ in range(100)]
    with kvdb.connect(server.target) as other, grpc.insecure_channel(server.target.removeprefix("kvdb://")) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS_MAX).status
        assert other.contexts() == []
    assert not any(call.done() for call in waiting)
    gate.opened.set()
    assert {call.result(SECONDS_MAX).queries for call in waiting} == {1}


def test_a_call_that_is_cancelled_while_it_waits_gives_its_turn_on(serve, stub_of, busy, gate):
    server = serve(workers=1)
    request = pb.StatsRequest(session_id=busy(server))
    stub = stub_of(server)
    gone, stays = stub.Stats.future(request), stub.Stats.future(request)
    gone.cancel()
    gate.opened.set()
    assert stays.result(SECONDS_MAX).queries == 1


def first_refused(calls, count):
    """The statuses of so many calls, those that end first."""
    ended = Queue()
    for call in calls:
        call.add_done_callback(ended.put)
    return [ended.get(timeout=SECONDS_MAX).code() for _ in range(count)]


def test_too_many_calls_that_wait_are_refused(serve, stub_of, busy, gate):
    server = serve(workers=1)
    request, stub = pb.StatsRequest(session_id=busy(server)), stub_of(server)
    calls = [stub.Stats.future(request) for _ in range(CLIENT_WAITING_MAX + 20)]
    assert first_refused(calls, 20) == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 20
    gate.opened.set()
    assert {call.code() for call in calls} == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_messages_that_wait_are_bounded(serve, stub_of, busy, gate, spec):
    """One client has three quarters of the room, which hold two messages; the rest is for others."""
    server = serve(message_bytes_max=MIB, request_bytes_max=MIB, inflight_bytes_max=3 * MIB)
    k = codec.to_array(ones(2, 3800))  # with v 0.93 MiB
    request, stub = pb.UpdateRequest(session_id=busy(server), layer=1, k=k, v=k), stub_of(server)
    calls = [stub.Update.future(request) for _ in range(3)]
    assert first_refused(calls, 1) == [grpc.StatusCode.RESOURCE_EXHAUSTED]
    with kvdb.connect(server.target) as other:
        other.create_session(spec, [1] * 10_000).close()
    gate.opened.set()
    assert sorted(call.code() is grpc.StatusCode.OK for call in calls) == [False, True, True]
