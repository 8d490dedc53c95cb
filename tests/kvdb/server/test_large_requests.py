"""Requests that are larger than a message go over a stream in pieces; what one message may have bounds what gRPC holds."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdb
from kvdb import errors
from kvdb.config import MIB
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.calls import Stub
from kvdb.rpc.request_parts import PART_HEAD_BYTES_MAX, cut
from kvdb.rpc.status import ERROR_KEY
from kvdb.server.incoming import Incoming
from kvdb.server.inflight import InflightBytes

N = 600  # tokens; their q has 2.3 MiB, k and v 1.2 each, and a message holds 1
GROWTH_BYTES_MAX = 48 * MIB
"""How much a server may grow by messages of which it takes 4 MiB: theirs, and what its threads and allocator keep."""


@pytest.fixture
def spec():
    return kvdb.ModelSpec("wide", layers=1, q_heads=16, kv_heads=8, head_dim=64, dtype="float32")


@pytest.fixture
def target(serve):
    return serve(message_bytes_max=MIB).target


@pytest.fixture(params=["direct", "public"])
def client(request, target, monkeypatch):
    if request.param == "public":
        monkeypatch.setattr("kvdb.client.remote.session_stream.available", lambda connection: False)
    with kvdb.connect(target) as opened:
        yield opened


@given(st.binary(min_size=1, max_size=500), st.integers(PART_HEAD_BYTES_MAX + 1, 200))
def test_pieces_make_up_the_whole(data, message_bytes_max):
    inflight = InflightBytes(1000)
    incoming = Incoming(inflight, "a", 500)
    *before, last = cut(data, message_bytes_max)
    assert all(part.ByteSize() <= message_bytes_max for part in (*before, last))
    assert [incoming.put_together(part) for part in before] == [None] * len(before)
    assert incoming.put_together(last) == data
    incoming.answered()
    inflight.take("a", 750)  # everything was given back
    inflight.take("b", 250)


def test_large_requests_are_answered_as_embedded(client, engine, spec, make_kv):
    kv = make_kv(spec, N)
    k, v = kv.pairs()[0]
    with client.create_session(spec, kv.tokens) as session:
        mine = engine.create_session(spec, kv.tokens)
        assert np.array_equal(session.attend(0, kv.q[0], k, v, start=0), mine.attend(0, kv.q[0], k, v, start=0))
        assert np.array_equal(session.attention(0, kv.q[0]), mine.attention(0, kv.q[0]))
        mine.close()


def test_an_error_in_a_large_request_leaves_the_session_as_it_was(client, spec, make_kv):
    kv = make_kv(spec, N)
    k, v = kv.pairs()[0]
    poisoned = k.copy()
    poisoned[1, N - 1, 3] = np.nan
    with client.create_session(spec, kv.tokens) as session:
        with pytest.raises(errors.NonFiniteError, match="KV head 1"):
            session.update(0, poisoned, v)
        session.update(0, k, v, start=0)


def test_a_large_sample_of_queries_is_kept(client, spec, make_kv):
    kv = make_kv(spec, N)
    client.import_context(spec, kv.tokens, kv.pairs(), name="doc", queries=[kv.q[0]])
    assert client.explain("doc", layer=0, analyze=True)


@pytest.fixture
def stub(target):
    with grpc.insecure_channel(target.removeprefix("kvdb://")) as channel:
        yield Stub(channel)


def piece(nbytes, data):
    return pb.RequestPart(nbytes=nbytes, data=data)


STATS = pb.DecodeRequest(part=piece(3, b"abc")).SerializeToString()
WRONG = {
    "nothing in it": [piece(10, b"")],
    "more than the whole": [piece(10, b"x" * 11)],
    "another whole": [piece(10, b"x"), piece(11, b"x")],
    "too much at the end": [piece(10, b"x" * 9), piece(10, b"xx")],
    "no request": [piece(3, b"\xff\xff\xff")],
    "a piece of a piece": [piece(len(STATS), STATS)],
    "of no size": [piece(0, b"")],
    "over the limit": [piece(65 * MIB, b"x")],
}


@pytest.mark.parametrize("parts", WRONG.values(), ids=list(WRONG))
def test_pieces_that_make_up_nothing(stub, spec, parts):
    def begun():
        yield pb.ImportRequest(begin=pb.ImportBegin(spec=codec.to_spec(spec), tokens=b"\1\0\0\0", name="doc"))
        yield from (pb.ImportRequest(part=part) for part in parts)

    for replies in (stub.Decode(pb.DecodeRequest(part=part) for part in parts), stub.ImportContext(begun())):
        with pytest.raises(grpc.RpcError) as raised:
            list(replies)
        assert raised.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
        kinds = {entry.value for entry in raised.value.trailing_metadata() if entry.key == ERROR_KEY}
        assert kinds <= {"InvalidArgument", "MessageTooLarge"}


def test_another_request_between_two_pieces(stub):
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Decode(iter([pb.DecodeRequest(part=piece(10, b"x")), pb.DecodeRequest(update=pb.UpdateRequest())])))
    assert "between the pieces" in raised.value.details()


def test_a_request_waits_until_there_is_room_for_all_of_it():
    inflight = InflightBytes(MIB * 3 // 2)
    first, second = Incoming(inflight, "a", MIB), Incoming(inflight, "b", MIB)
    assert first.put_together(piece(MIB, b"x")) is None
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(second.put_together, piece(MIB, b"x" * MIB))
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        first.close()
        assert waiting.result(20) == b"x" * MIB


def test_a_client_that_stops_between_two_pieces_gives_its_room_back(serve, spec, make_kv):
    server = serve(stream_idle_seconds=0.2, message_bytes_max=MIB, request_bytes_max=9 * MIB, inflight_bytes_max=12 * MIB)
    stopped = threading.Event()

    def half():
        yield pb.DecodeRequest(part=piece(9 * MIB, b"x" * (MIB // 2)))
        stopped.wait(20)

    with grpc.insecure_channel(server.target.removeprefix("kvdb://")) as channel, kvdb.connect(server.target) as db:
        replies = Stub(channel).Decode(half())
        next(replies)
        kv = make_kv(spec, N)
        with db.create_session(spec, kv.tokens) as session:
            session.update(0, *kv.pairs()[0])
        stopped.set()


def resident(pid):
    fields = Path(f"/proc/{pid}/status").read_text().split()
    return int(fields[fields.index("VmRSS:") + 1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("nbytes", [8 * MIB, MIB - 1024], ids=["too large", "too many"])
def test_messages_that_are_refused_take_no_memory(process, spec, tmp_path, nbytes):
    """gRPC takes no message over the limit into memory; of those below it, the server holds no more than it says."""
    config = tmp_path / "kvdb.toml"
    config.write_text(f"[server]\nmessage_bytes_max = {MIB}\nrequest_bytes_max = {MIB}\ninflight_bytes_max = {4 * MIB}\n")
    with process("--config", str(config)) as (running, line), kvdb.connect(line.split()[-1]) as db:
        db.create_session(spec, [1]).close()
        before = resident(running.pid)
        address = line.split()[-1].removeprefix("kvdb://")
        with grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)]) as channel:
            call = channel.unary_unary("/kvdb.v1.Kvdb/ListContexts")
            message = pb.StoreRequest(tokens=bytes(nbytes)).SerializeToString()  # an unknown field to ListContexts
            calls = [call.future(message) for _ in range(24)]
            codes = [each.code() for each in calls]
        assert resident(running.pid) - before < GROWTH_BYTES_MAX
        refused = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert set(codes) == {refused} if nbytes > MIB else set(codes) <= {refused, grpc.StatusCode.OK}
