"""The decode stream of a session, by both ways to drive one: in the caller's thread, and through gRPC's public API."""

import signal
import sys
import threading

import numpy as np
import pytest

import kvdb
from kvdb import errors
from kvdb.client.remote.direct import DirectDecode
from kvdb.client.remote.stream import Stream
from kvdb.session.state import SessionState
from tests.waiting import until

LOOKS = 20


@pytest.fixture(params=[DirectDecode, Stream], autouse=True)
def way(request, monkeypatch):
    """The way that is taken, and no other."""
    if request.param is Stream:
        monkeypatch.setattr("kvdb.client.remote.session_stream.available", lambda connection: False)
    other = {DirectDecode: Stream, Stream: DirectDecode}[request.param]
    monkeypatch.delattr(other, "exchange")


def ones(heads, n=1):
    return np.ones((heads, n, 16), np.float32)


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


def blocked(thread):
    """Whether a thread stands where it stood when this was asked LOOKS times before, for a condition of `until`."""
    seen = []

    def same():
        frame = sys._current_frames()[thread.ident]
        seen.append((frame.f_code.co_name, frame.f_lasti))
        return len(seen) >= LOOKS and len(set(seen[-LOOKS:])) == 1

    return same


def test_an_interrupted_call_does_not_answer_the_next(client, spec, monkeypatch):
    update, interrupted, updated = SessionState.update, threading.Event(), threading.Event()

    def slow(self, layer, k, v, start=None):
        until(blocked(threading.main_thread()))  # an interrupt while gRPC takes a lock would leave it taken
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        assert interrupted.wait(20)
        update(self, layer, k, v, start)
        updated.set()

    monkeypatch.setattr(SessionState, "update", slow)
    with client.create_session(spec, [1]) as session:
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            session.update(0, ones(2), ones(2))
        signal.signal(signal.SIGALRM, previous)
        interrupted.set()
        assert updated.wait(20)
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
    until(lambda: len([t for t in threading.enumerate() if not t.name.startswith("kvdb-server")]) <= before)
