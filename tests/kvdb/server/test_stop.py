"""A server that is stopped while calls wait for their turn ends, whatever they wait for."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

import kvdb.server.serve as serve_module
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.session.state import SessionState

SECONDS_MAX = 20


@pytest.fixture
def gate(monkeypatch):
    """Two events: a session is being closed, and it may be."""
    reached, opened = threading.Event(), threading.Event()
    close = SessionState.close

    def slowly(session):
        reached.set()
        assert opened.wait(SECONDS_MAX)
        close(session)

    monkeypatch.setattr(SessionState, "close", slowly)
    yield reached, opened
    opened.set()


@pytest.fixture
def last_call(monkeypatch):
    """An event: the threads of the server take no more work."""
    told = threading.Event()

    class Telling(ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            told.set()
            super().shutdown(wait)

    monkeypatch.setattr(serve_module, "ThreadPoolExecutor", Telling)
    return told


def test_calls_that_wait_for_a_session_do_not_hold_it_up(last_call, gate, serve, spec, stub_of, caplog):
    reached, opened = gate
    server = serve()
    stub = stub_of(server)
    session = stub.CreateSession(pb.CreateSessionRequest(spec=codec.to_spec(spec))).session_id
    kv = codec.to_array(np.ones((2, 1, 16), np.float32))
    update = pb.UpdateRequest(session_id=session, layer=0, k=kv, v=kv)
    calls = [stub.CloseSession.future(pb.CloseSessionRequest(session_id=session))]
    assert reached.wait(SECONDS_MAX)
    calls += [stub.Stats.future(pb.StatsRequest(session_id=session)) for _ in range(3)]
    calls += [stub.Decode(iter([pb.DecodeRequest(update=update)])), stub.Update.future(update)]
    stub.Hello(pb.HelloRequest())  # which has a turn of its own, and comes behind them
    stopping = threading.Thread(target=server.stop, args=(0,))
    stopping.start()
    assert last_call.wait(SECONDS_MAX)
    opened.set()
    stopping.join(SECONDS_MAX)
    assert not stopping.is_alive()
    assert not caplog.records
    assert {call.code() for call in calls} <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
