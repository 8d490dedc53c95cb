"""A server that is not there, or no more."""

import socket
import time

import numpy as np
import pytest

import kvdb
from kvdb import errors
from tests.waiting import until


def ones(heads, n=1):
    return np.ones((heads, n, 16), np.float32)


@pytest.fixture
def nobody():
    """A port of this machine on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_nobody_listens(nobody):
    started = time.monotonic()
    with pytest.raises(errors.Unavailable, match=rf"kvdb://127\.0\.0\.1:{nobody}.*kvdb serve"):
        kvdb.connect(f"kvdb://127.0.0.1:{nobody}")
    assert time.monotonic() - started < 5


def test_no_socket_file(tmp_path):
    with pytest.raises(errors.Unavailable, match="none.sock"):
        kvdb.connect(f"kvdb+unix://{tmp_path}/none.sock")


def test_somebody_else_listens():
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.listen()
        port = other.getsockname()[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvdb.client.remote.connection.CONNECT_SECONDS", 0.5)
            with pytest.raises(errors.Unavailable, match=str(port)):
                kvdb.connect(f"kvdb://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "target", ["kvdb://", "kvdb://host:x", "kvdb://host:99999", "kvdb://host/path", "kvdb://user@host", "kvdb+unix://host/path"]
)
def test_a_target_that_names_no_server(target):
    with pytest.raises(errors.InvalidArgument, match="kvdb://host:port"):
        kvdb.connect(target)


def test_a_server_that_is_killed(process, spec, make_kv):
    kv = make_kv(spec, 300)
    with process() as (running, line):
        target = line.split()[-1]
        with kvdb.connect(target) as db:
            session, unused = db.create_session(spec, [1]), db.create_session(spec, [1])
            session.attend(0, ones(4), ones(2), ones(2))

            def dies():
                yield kv.pairs()[0]
                running.kill()
                running.wait()
                yield kv.pairs()[1]

            with pytest.raises(errors.Unavailable, match=target):
                db.import_context(spec, kv.tokens, dies(), name="doc")
            for call in (
                lambda: session.attend(0, ones(4), ones(2), ones(2)),
                lambda: unused.attend(0, ones(4), ones(2), ones(2)),
                session.stats,
                db.contexts,
                lambda: db.create_session(spec, [1]),
            ):
                with pytest.raises(errors.Unavailable, match="connect again"):
                    call()
            session.close()


def answers(db):
    """Whether a client finds its server."""
    try:
        return db.contexts() == []
    except errors.Unavailable:
        return False


def test_a_client_finds_the_server_that_came_back(serve, spec):
    first = serve(local_socket="auto")
    port = int(first.target.rpartition(":")[2])
    with kvdb.connect(first.target) as db:
        session = db.create_session(spec, [1])
        session.update(0, ones(2), ones(2))
        assert db._transport._connection.lanes._free
        first.stop(grace=0)
        with pytest.raises(errors.Unavailable):
            session.stats()
        second = serve(port=port, local_socket="auto")
        until(lambda: answers(db))
        with pytest.raises(errors.SessionClosed, match="create_session"):
            session.update(0, ones(2), ones(2))
        with db.create_session(spec, [1]) as again:
            again.update(0, ones(2), ones(2))
        assert second._local._lanes, "memory is shared with the new server too"
