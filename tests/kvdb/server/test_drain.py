"""A server that is told to stop: who waits hears so at once, who works may finish, and where nobody does it ends at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvdb
from kvdb import errors
from kvdb.session.state import SessionState
from tests.waiting import until

SECONDS_MAX = 20.0
GRACE = 10.0
AT_ONCE = 1.0


def ones(heads, n=1):
    return np.ones((heads, n, 16), np.float32)


@pytest.fixture
def busy(monkeypatch):
    """Two events: an update is under way, and it may go on."""
    reached, opened = threading.Event(), threading.Event()
    update = SessionState.update

    def slowly(self, layer, k, v, start=None):
        reached.set()
        assert opened.wait(SECONDS_MAX)
        update(self, layer, k, v, start)

    monkeypatch.setattr(SessionState, "update", slowly)
    yield reached, opened
    opened.set()


def seconds_of(call):
    began = monotonic()
    call()
    return monotonic() - began


@pytest.mark.parametrize("local_socket", ["auto", ""], ids=["shared memory", "gRPC"])
def test_without_open_work_it_ends_at_once(serve, spec, local_socket):
    server = serve(local_socket=local_socket)
    with kvdb.connect(server.target) as db, db.create_session(spec, [1]) as session:
        session.attend(0, ones(4), ones(2), ones(2))
        assert seconds_of(lambda: server.stop(GRACE)) < AT_ONCE

        def attend():
            with pytest.raises(errors.Unavailable):
                session.attend(0, ones(4), ones(2), ones(2))

        assert seconds_of(attend) < AT_ONCE


@pytest.mark.parametrize("local_socket", ["auto", ""], ids=["shared memory", "gRPC"])
def test_open_work_finishes_and_nothing_else_begins(serve, spec, busy, local_socket):
    reached, opened = busy
    server = serve(local_socket=local_socket)
    with kvdb.connect(server.target) as db, kvdb.connect(server.target) as other, ThreadPoolExecutor(2) as threads:
        session, idle = db.create_session(spec, [1]), other.create_session(spec, [1])
        idle.attend(0, ones(4), ones(2), ones(2))
        with grpc.insecure_channel(server.target.removeprefix("kvdb://")) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            updated = threads.submit(session.update, 0, ones(2), ones(2))
            assert reached.wait(SECONDS_MAX)
            stopped = threads.submit(server.stop, GRACE)
            until(lambda: next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING)
        until(lambda: refuses(server.target))

        def refused():
            with pytest.raises(errors.Unavailable):
                idle.attend(0, ones(4), ones(2), ones(2))

        assert seconds_of(refused) < AT_ONCE
        assert not updated.done()
        opened.set()
        updated.result(SECONDS_MAX)
        assert seconds_of(lambda: stopped.result(SECONDS_MAX)) < AT_ONCE


def refuses(target):
    """Whether a server takes no new client."""
    try:
        kvdb.connect(target).close()
    except errors.Unavailable:
        return True
    return False
