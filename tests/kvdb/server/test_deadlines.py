"""A server that stalls holds no client for longer than its call may take."""

import threading
from contextlib import contextmanager
from time import monotonic

import numpy as np
import pytest

import kvdb
from kvdb import errors
from kvdb.config import Timeouts
from kvdb.ingest.import_writer import ImportWriter
from kvdb.session.state import SessionState
from tests.waiting import until

SECONDS_MAX = 20.0
SHORT = 0.15
WAYS = {"shared memory": "auto", "gRPC": ""}


def ones(heads, n=1):
    return np.ones((heads, n, 16), np.float32)


@contextmanager
def stalling(kind, name):
    """The method waits until the end of the body before it does anything."""
    opened, method = threading.Event(), getattr(kind, name)

    def slowly(*arguments, **named):
        assert opened.wait(SECONDS_MAX)
        return method(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, slowly)
        try:
            yield
        finally:
            opened.set()


def too_late(call):
    """The error of a call that has to end early, and promptly."""
    began = monotonic()
    with pytest.raises(errors.DeadlineExceeded) as raised:
        call()
    assert monotonic() - began < SHORT + 2
    return raised.value


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def stalled(request, serve):
    return serve(local_socket=request.param).target


def test_a_call_a_session_and_a_client_say_how_long(stalled, spec):
    with kvdb.connect(stalled) as db, kvdb.connect(stalled, timeout=SHORT) as hasty:
        patient = db.create_session(spec, [1])
        sessions = [db.create_session(spec, [1], timeout=SHORT), hasty.create_session(spec, [1])]
        twin = sessions[0].fork()
        with stalling(SessionState, "attend"):
            too_late(lambda: patient.attend(0, ones(4), ones(2), ones(2), timeout=SHORT))
            for session in (*sessions, twin):
                error = too_late(lambda session=session: session.attend(0, ones(4), ones(2), ones(2)))
                assert "timeout=" in str(error)


def test_a_stream_of_the_public_api_says_so_too(serve, spec, monkeypatch):
    monkeypatch.setattr("kvdb.client.remote.session_stream.available", lambda _connection: False)
    with kvdb.connect(serve().target) as db, db.create_session(spec, [1]) as session, stalling(SessionState, "update"):
        too_late(lambda: session.update(0, ones(2), ones(2), timeout=SHORT))


def test_after_a_late_answer_the_session_goes_on(serve, spec, monkeypatch):
    with kvdb.connect(serve().target) as db, db.create_session(spec, [1]) as session:
        with monkeypatch.context() as patch:
            patch.setattr(SessionState, "update", lambda *_: threading.Event().wait(2 * SHORT))
            too_late(lambda: session.update(0, ones(2), ones(2), timeout=SHORT))
        session.update(0, ones(2), ones(2), start=0)
        assert session.attention(0, ones(4)).shape == (4, 1, 16)


def test_unary_calls(stalled, engine, spec):
    with kvdb.connect(stalled) as db:
        with stalling(type(engine), "get"):
            too_late(lambda: db.get("doc", timeout=SHORT))
        with db.create_session(spec, [1]) as session, stalling(type(engine), "attend"):
            too_late(lambda: db.attend([session], 0, *(ones(heads)[None] for heads in (4, 2, 2)), timeout=SHORT))


@pytest.mark.parametrize("local_socket", WAYS.values(), ids=WAYS)
def test_imports_go_by_their_progress(serve, local_socket, spec, make_kv):
    kv, server = make_kv(spec, 40), serve(local_socket=local_socket)
    with kvdb.connect(server.target, timeout=Timeouts(progress=SHORT, store=SHORT)) as db:
        with stalling(ImportWriter, "write"):
            too_late(lambda: db.import_context(spec, kv.tokens, kv.pairs(), name="doc"))
            until(lambda: not any(one.context.is_active() for one in server._streams._open), "the server never heard of its end")
        assert db.contexts() == []


def test_an_import_that_takes_too_long_leaves_nothing(stalled, spec, make_kv, eventually, blocks_used):
    kv = make_kv(spec, 40)

    def slow():
        yield kv.pairs()[0]
        threading.Event().wait(SHORT)
        yield kv.pairs()[1]

    with kvdb.connect(stalled) as db:
        too_late(lambda: db.import_context(spec, kv.tokens, slow(), name="doc", timeout=SHORT))
        eventually(lambda: blocks_used() == 0)
        db.import_context(spec, kv.tokens, kv.pairs(), name="doc")


def test_a_frozen_read_ends(serve, spec, make_kv):
    kv = make_kv(spec, 40)
    with kvdb.connect(serve().target) as db:
        context = db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        with context.create_session(kv.tokens) as session, stalling(SessionState, "read"):
            too_late(lambda: session.read([0], timeout=SHORT))


@pytest.mark.parametrize("wrong", [0, -1, True, "1", float("nan"), float("inf")])
def test_a_timeout_is_a_number_of_seconds(client, spec, wrong):
    with pytest.raises(errors.InvalidArgument, match="timeout"):
        client.get("doc", timeout=wrong)
    with pytest.raises(errors.InvalidArgument, match="timeout"):
        client.create_session(spec, [1], timeout=wrong)


def test_the_table_of_timeouts_is_checked(target):
    with pytest.raises(errors.ConfigError, match=r"timeouts\.attend"):
        Timeouts(attend=0)
    with pytest.raises(errors.ConfigError, match="timeout"):
        kvdb.connect(target, timeout="soon")
    with pytest.raises(errors.InvalidArgument, match="embedded"):
        kvdb.connect(timeout=1)
