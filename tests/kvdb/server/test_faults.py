"""Faults of the network and of clocks: calls end with a status, others go on, and sessions and blocks are all accounted for."""

import subprocess
import sys
import time
from contextlib import nullcontext

import numpy as np
import pytest

import kvdb
from kvdb import errors
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.database import Database
from kvdb.rpc import options
from kvdb.server.serve import Server
from tests.kvdb.server.proxy import Proxy
from tests.waiting import until

KEEPALIVE_MS = 200
FAULTS = ["reset", "stall"]


def ones(heads, n=1):
    return np.ones((heads, n, 16), np.float32)


def port_of(server):
    return int(server.target.rpartition(":")[2])


@pytest.fixture
def soon(monkeypatch):
    """A peer that is silent is given up after two fifths of a second."""
    times = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
    shared = [(name, KEEPALIVE_MS if name in times else value) for name, value in options._SHARED]
    monkeypatch.setattr(options, "_SHARED", shared)
    monkeypatch.setattr(options, "KEEPALIVE_SECONDS", KEEPALIVE_MS / 1000)


@pytest.fixture
def server(soon, serve):
    return serve(session_idle_seconds=0.8)


@pytest.fixture
def other(server, spec):
    """Another client, which is answered rightly whatever befalls the first."""
    with kvdb.connect(server.target) as db:

        def goes_on():
            with db.create_session(spec, [9]) as session:
                np.testing.assert_allclose(session.attend(0, ones(4), ones(2), ones(2)), ones(4), rtol=1e-6)

        yield goes_on


def all_accounted(engine, handles, blocks, blocks_used, other):
    """Whether the engine holds what it held before the fault and no more; the other client goes on meanwhile."""
    other()
    if len(engine.handles._handles) > handles or blocks_used() > blocks or engine.handles._calls:
        return False
    engine.check_integrity()
    return True


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", ["decode", "import", "read"])
def test_a_connection_that_breaks(server, engine, spec, make_kv, other, blocks_used, call, fault):
    kv = make_kv(spec, 300)
    with kvdb.connect(server.target) as db:
        db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    handles, blocks = len(engine.handles._handles), blocks_used()
    fresh = make_kv(spec, 200, seed=5)
    with Proxy(port_of(server)) as proxy, kvdb.connect(proxy.target) as db:
        session = db.create_session(spec, [1])
        session.attend(0, ones(4), ones(2), ones(2))

        def breaking():
            yield fresh.pairs()[0]
            getattr(proxy, fault)()
            yield fresh.pairs()[1]

        def attends():
            getattr(proxy, fault)()
            session.attend(1, ones(4), ones(2), ones(2))

        def reads():
            context = db.get("doc")
            getattr(proxy, fault)()
            np.testing.assert_array_equal(context.read(0)[0], kv.k[0])

        calls = {"decode": attends, "read": reads, "import": lambda: db.import_context(spec, fresh.tokens, breaking(), name="x")}
        began = time.monotonic()
        # A read is made of calls that gRPC makes again, on a new connection.
        with nullcontext() if call == "read" else pytest.raises((errors.Unavailable, errors.SessionClosed)):
            calls[call]()
        assert time.monotonic() - began < 10
        until(lambda: all_accounted(engine, handles, blocks, blocks_used, other), "sessions or blocks are left")


@pytest.mark.parametrize("jump", [-1e7, 1e7])
def test_a_clock_that_jumps_ends_no_session(serve, spec, jump, monkeypatch):
    server = serve(session_idle_seconds=60.0, stream_idle_seconds=60.0)
    with kvdb.connect(server.target) as db, db.create_session(spec, [1]) as session:
        session.attend(0, ones(4), ones(2), ones(2))
        now = time.time()
        with monkeypatch.context() as patch:  # not for the client, for gRPC's own deadlines are made of it
            patch.setattr(time, "time", lambda: now + jump)
            server._tenants.close_idle()
            server._streams.end_idle()
        np.testing.assert_allclose(session.attend(1, ones(4), ones(2), ones(2)), ones(4), rtol=1e-6)
        assert session.stats().queries == 2


@pytest.mark.parametrize("local_socket", ["", "auto"], ids=["grpc", "shared memory"])
def test_a_client_goes_on_with_a_server_that_came_back_with_its_store(tmp_path, spec, make_kv, local_socket):
    kv = make_kv(spec, 300)
    config = Config(storage=StorageConfig(arena_bytes=1 << 20, path=str(tmp_path / "store")))
    port = 0
    with Database(config) as engine:
        first = Server(engine, ServerConfig(port=0, local_socket=local_socket))
        first.start()
        port = port_of(first)
        db = kvdb.connect(first.target)
        db.import_context(spec, kv.tokens, kv.pairs(), name="doc", durability="durable")
        session = db.create_session(spec, kv.tokens)
        session.attend(0, ones(4), ones(2), ones(2))
        first.stop(grace=0)
    with pytest.raises(errors.Unavailable):
        session.stats()
    with Database(config) as engine:
        second = Server(engine, ServerConfig(port=port, local_socket=local_socket))
        second.start()
        try:
            until(lambda: finds(db), "the client does not find the server that came back")
            with db.create_session(spec, kv.tokens) as again:
                assert again.reused == len(kv.tokens)
                again.attend(0, ones(4), ones(2), ones(2))
                assert bool(second._local._lanes) is bool(local_socket)
            for layer, pair in enumerate(kv.pairs()):
                np.testing.assert_array_equal(db.get("doc").read(layer)[0], pair[0])
            engine.check_integrity()
        finally:
            db.close()
            second.stop(grace=0)


KILLED = """
import sys, numpy as np, kvdb
target, doing = sys.argv[1:]
db = kvdb.connect(target)
context = db.get("doc")
session = db.create_session(context.spec, context.token_ids())
q, k = np.ones((4, 1, 16), np.float32), np.ones((2, 1, 16), np.float32)
if doing == "decode":
    db._transport._connection.lanes.close()
while True:
    context.read([0, 1]) if doing == "read" else session.attend(0, q, k, k)
    print("on", flush=True)
"""


def test_clients_that_are_killed_leave_nothing(serve, engine, spec, make_kv, blocks_used):
    server, kv = serve(session_idle_seconds=0.4, local_socket="auto"), make_kv(spec, 2000)
    with kvdb.connect(server.target) as db:
        db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        before = blocks_used()
        running = [
            subprocess.Popen([sys.executable, "-c", KILLED, server.target, doing], stdout=subprocess.PIPE)
            for doing in ("decode", "shared", "read")
        ]
        for one in running:
            assert one.stdout.readline() == b"on\n"
        for one in running:
            one.kill()
            one.communicate()
        until(lambda: not engine.count_sessions() and blocks_used() == before, "sessions of clients that were killed are left")
        until(lambda: not server._streams._open and sum(lane.alive for lane in server._local._lanes) <= 1, "regions are left")
        engine.check_integrity()
        np.testing.assert_array_equal(db.get("doc").read(0)[0], kv.pairs()[0][0])


def finds(db):
    """Whether a client finds its server, and the context in it."""
    try:
        return [context.name for context in db.contexts()] == ["doc"]
    except errors.Unavailable:
        return False
