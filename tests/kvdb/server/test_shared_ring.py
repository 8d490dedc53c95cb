"""Nothing that a client writes into the memory it shares brings the server down, hangs it, or changes another's data."""

import fcntl
import os
import socket
import subprocess
import sys
from threading import Thread

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvdb
import kvdb._native as _native
from kvdb import errors
from kvdb.client.remote.shared_memory.lane import SharedLane
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.shared_records import (
    ARENA_AT,
    REGION_BYTES,
    CallKind,
    SharedRequest,
    address_of,
    pack_request,
    unpack_answer,
    unpack_request,
)
from kvdb.rpc.shared_region import create_region
from kvdb.rpc.status import STATUS
from tests.waiting import until

CLASSES = {"", *(kind.__name__ for kind in STATUS)}
WORDS = st.one_of(
    st.integers(0, (1 << 64) - 1), st.sampled_from([0, 1, ARENA_AT, ARENA_AT + 64, REGION_BYTES - 64, REGION_BYTES, 1 << 63])
)
SECONDS_MAX = 10.0


@pytest.fixture
def target(serve):
    return serve(local_socket="auto").target


@pytest.fixture
def hello(stub):
    return stub.Hello(pb.HelloRequest())


@pytest.fixture
def lane(hello):
    opened = SharedLane(hello.local_socket, hello.local_server, "")
    yield opened
    opened.close()


def answered(lane, request):
    """What the server says to a request, whatever it is."""
    assert lane.region.ring.send(pack_request(request))
    return unpack_answer(lane.region.ring.receive(SECONDS_MAX))


requests = st.builds(
    SharedRequest,
    generation=st.booleans(),  # whether it is the region's
    number=WORDS,
    kind=st.one_of(st.sampled_from(list(CallKind)), st.integers(0, (1 << 32) - 1)),
    start=st.one_of(st.none(), st.integers(-(1 << 63), (1 << 63) - 1)),
    tokens=st.one_of(st.integers(0, 4), WORDS),
    **dict.fromkeys(("q", "k", "v", "message", "message_nbytes", "reply", "reply_room", "layer", "request"), WORDS),
    seconds=st.floats(allow_nan=False),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(request=requests, message=st.binary(max_size=64))
def test_any_request_has_an_answer(lane, request, message):
    lane.region.write(ARENA_AT, message)
    right = bool(request.generation)
    said = answered(lane, request._replace(generation=lane.generation if right else lane.generation ^ 1))
    assert (said.number, said.generation) == (request.number, lane.generation)
    assert said.error in CLASSES - {"InternalError"}
    assert right or said.error == "InvalidArgument"


@given(request=requests)
def test_a_request_comes_out_as_it_went_in(request):
    assert unpack_request(pack_request(request)) == request
    assert len(pack_request(request)) == 128


def test_a_session_of_nobody_is_not_there(lane, spec):
    message = pb.AttentionRequest(session_id="x" * 22, layer=0).SerializeToString()
    lane.region.write(ARENA_AT, message)
    request = SharedRequest(lane.generation, 1, CallKind.ATTENTION, None, 1, ARENA_AT + 64, message=ARENA_AT)
    said = answered(lane, request._replace(message_nbytes=len(message), reply=ARENA_AT + 4096, reply_room=4096))
    assert said.error == "SessionClosed"
    assert b"no such session" in lane.region.read(ARENA_AT + 4096, said.reply_nbytes)


def test_a_reply_without_room_is_refused_and_the_session_stays_whole(client, lane, spec, make_kv):
    kv = make_kv(spec, 3)
    with client.create_session(spec, kv.tokens) as session:
        session.update(0, *(array[:, :2] for array in kv.pairs()[0]))
        expected = session.attention(0, kv.q[0][:, 1:2])
        message = pb.AttentionRequest(session_id=session._transport.id, layer=0).SerializeToString()
        lane.region.write(ARENA_AT, message)
        request = SharedRequest(lane.generation, 1, CallKind.ATTENTION, None, 1, ARENA_AT + 64, message=ARENA_AT)
        assert answered(lane, request._replace(message_nbytes=len(message), reply=ARENA_AT)).error == "InvalidArgument"
        assert np.array_equal(session.attention(0, kv.q[0][:, 1:2]), expected)


def test_a_client_that_claims_too_much_is_dropped(client, lane, spec):
    np.frombuffer(lane.region.memory, np.uint32)[0] = 1 << 20  # requests sent
    _wake(lane)
    until(lambda: _gone(lane))
    assert client.contexts() == []


def test_a_server_that_claims_too_much_is_left(lane):
    np.frombuffer(lane.region.memory, np.uint32)[16] = 1 << 20  # answers sent
    with pytest.raises(errors.Unavailable, match="claims to have sent"):
        lane._next(SECONDS_MAX)


def test_the_ring_is_bounded(lane):
    full = [lane.region.ring.send(b"\0" * 128) for _ in range(_native.RING_SLOTS + 1)]
    assert full == [True] * _native.RING_SLOTS + [False]
    for _ in range(_native.RING_SLOTS):
        assert unpack_answer(lane.region.ring.receive(SECONDS_MAX)).error == "InvalidArgument"  # of generation 0
    assert lane.region.ring.receive(0.0) is None


def test_a_region_is_sealed():
    descriptor = create_region()
    try:
        for size in (0, REGION_BYTES * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(descriptor)


def test_a_wait_ends_when_it_is_told_to():
    memory = np.zeros(_native.RING_BYTES + 8192, np.uint8)
    start = -memory.ctypes.data % 4096
    ring = _native.SharedRing(memory[start : start + _native.RING_BYTES], True)
    waiting = Thread(target=ring.receive, args=(60.0,))
    waiting.start()
    until(lambda: _stopped(ring, waiting))


@pytest.mark.parametrize("token", ["", "geheim2", "x" * 5000])
def test_a_wrong_token_shares_no_memory(serve, stub_of, token):
    hello = stub_of(server := serve(token="geheim", local_socket="auto")).Hello(
        pb.HelloRequest(), metadata=(("authorization", "Bearer geheim"),)
    )
    SharedLane(hello.local_socket, hello.local_server, "geheim").close()
    with pytest.raises(errors.Unavailable):
        SharedLane(hello.local_socket, hello.local_server, token)
    assert server.target


def test_a_socket_of_another_server_is_not_used(hello):
    with pytest.raises(errors.Unavailable, match="another server"):
        SharedLane(hello.local_socket, bytes(16), "")


def test_half_open_sockets_leave_others_alone(hello, client, spec, make_kv):
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for one in silent:
        one.connect(address_of(hello.local_socket))
    kv = make_kv(spec, 5)
    with client.create_session(spec, kv.tokens) as session:
        session.update(0, *kv.pairs()[0])
        assert session._transport.connection.lanes.refusal == ""
    for one in silent:
        one.close()


KILLED = """
import os, signal, sys, numpy as np, kvdb
db = kvdb.connect(sys.argv[1])
spec = kvdb.ModelSpec("model", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")
kv = np.ones((2, 100, 16), np.float32)
session = db.create_session(spec, np.arange(100))
session.update(0, kv, kv)
db._transport.begin_import(spec, np.arange(100, dtype=np.int32), "half").write(0, kv, kv)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_client_leaves_nothing_behind(target, engine, blocks_used):
    assert subprocess.run([sys.executable, "-c", KILLED, target], check=False, timeout=60).returncode == -9
    until(lambda: blocks_used() == 0)
    engine.check_integrity()


def test_a_server_that_stops_is_unavailable(serve, spec, make_kv):
    server, kv = serve(local_socket="auto"), make_kv(spec, 3)
    with kvdb.connect(server.target) as db:
        session = db.create_session(spec, kv.tokens)
        session.update(0, *kv.pairs()[0])
        server.stop(grace=0)
        with pytest.raises(errors.Unavailable):
            session.attention(0, kv.q[0][:, :1])


def _wake(lane):
    """Let the server look, which sleeps until a request is sent."""
    lane.region.ring.send(b"\0" * 128)
    np.frombuffer(lane.region.memory, np.uint32)[0] = 1 << 20


def _gone(lane):
    try:
        return lane._socket.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _stopped(ring, waiting):
    ring.stop()
    return not waiting.is_alive()
