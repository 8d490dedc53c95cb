"""The decode stream of a session, by both ways to drive one: in the caller's thread, and through gRPC's public API."""

import signal
import threading
import time

import numpy as np
import pytest

import kvdb
from kvdb import errors
from kvdb.session import SessionState


@pytest.fixture(params=["direct", "public"], autouse=True)
def way(request, monkeypatch):
    if request.param == "public":
        monkeypatch.setattr("kvdb.client.remote.session.available", lambda connection: False)
    return request.param


def ones(heads, n=1):
    return np.ones((heads, n, 16), np.float32)


def test_the_way_that_is_asked_for_is_taken(client, spec, way):
    with client.create_session(spec, [1]) as session:
        session.update(0, ones(2), ones(2))
        assert type(session._transport._stream).__name__ == {"direct": "DirectDecode", "public": "StreamDecode"}[way]


def test_many_steps(client, spec, make_kv, engine):
    kv = make_kv(spec, 200)
    with client.create_session(spec, kv.tokens) as session:
        mine = engine.create_session(spec, kv.tokens)
        for at in range(200):
            arrays = (kv.q[0][:, at : at + 1], *(x[:, at : at + 1] for x in kv.pairs()[0]))
            assert (session.attend(0, *arrays, start=at) == mine.attend(0, *arrays)).all()
        mine.close()


def test_an_error_ends_the_stream_and_the_session_goes_on(client, spec):
    with client.create_session(spec, [1]) as session:
        session.update(0, ones(2), ones(2))
        for _ in range(3):
            with pytest.raises(errors.NonFiniteError):
                session.update(0, ones(2) * np.nan, ones(2))
            with pytest.raises(errors.PositionError):
                session.attention(0, ones(4, 9))
        session.attend(0, ones(4), ones(2), ones(2), start=1)


def test_an_interrupted_call_does_not_answer_the_next(client, spec, monkeypatch):
    update = SessionState.update

    def slow(self, layer, k, v, start=None):
        time.sleep(0.4)
        update(self, layer, k, v, start)

    monkeypatch.setattr(SessionState, "update", slow)
    with client.create_session(spec, [1]) as session:
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            session.update(0, ones(2), ones(2))
        signal.signal(signal.SIGALRM, previous)
        time.sleep(0.5)
        with pytest.raises(errors.PositionError, match="last 9 tokens"):
            session.attention(0, ones(4, 9))
        assert session.attention(0, ones(4)).shape == (4, 1, 16)


def test_a_server_that_stops_between_two_steps(serve, spec):
    server = serve()
    with kvdb.connect(server.target) as db, db.create_session(spec, [1]) as session:
        session.update(0, ones(2), ones(2))
        server.stop(grace=1)
        for _ in range(2):
            with pytest.raises(errors.Unavailable, match="connect again"):
                session.update(0, ones(2), ones(2))


def test_sessions_leave_no_threads(client, spec):
    before = threading.active_count()
    for _ in range(5):
        with client.create_session(spec, [1]) as session:
            session.update(0, ones(2), ones(2))
    deadline = time.monotonic() + 5
    while len([t for t in threading.enumerate() if not t.name.startswith("kvdb-server")]) > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
