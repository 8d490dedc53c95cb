"""`kvdb serve`: ready, healthy, and how it ends."""

import ctypes
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import kvdb
from kvdb import errors
from kvdb.config import ServerConfig
from kvdb.server.serve import Server
from tests.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING


def test_a_process_says_when_it_is_ready_and_ends_well(process):
    with process() as (running, line):
        assert re.fullmatch(rf"kvdb {re.escape(kvdb.__version__)} ready on kvdb://127\.0\.0\.1:\d+", line)
        with kvdb.connect(line.split()[-1]) as db:
            assert db.contexts() == []
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=10)
        assert (running.returncode, out) == (0, "")
        assert [text.split()[2] for text in err.splitlines()] == ["server_started", "server_draining", "server_stopped"]


def test_sigterm_lets_the_running_call_end_and_takes_no_more(process, spec, make_kv):
    """An import is under way when the signal comes; it is stored, and its client is told, before the process ends."""
    kv = make_kv(spec, 300)
    with process() as (running, line), kvdb.connect(line.split()[-1]) as db:
        idle = db.create_session(spec, kv.tokens)
        idle.attend(0, kv.q[0], *kv.pairs()[0])

        def slowly():
            running.send_signal(signal.SIGTERM)
            until(lambda: refused(line.split()[-1]))
            with pytest.raises(errors.Unavailable):
                idle.attention(0, kv.q[0])
            yield from kv.pairs()

        context = db.import_context(spec, kv.tokens, slowly(), name="doc")
        assert context.tokens == 300
        started = time.monotonic()
        assert running.wait(timeout=10) == 0
        assert time.monotonic() - started < 5, "the idle decode stream held the server up"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a signal for one thread is Linux's")
def test_sigterm_is_heard_whichever_thread_takes_it(process):
    with process() as (running, line), kvdb.connect(line.split()[-1]) as db:
        assert db.contexts() == []
        threads = [int(name) for name in os.listdir(f"/proc/{running.pid}/task")]
        another = max(thread for thread in threads if thread != running.pid)
        tgkill = {"x86_64": 234, "aarch64": 131}[platform.machine()]
        assert ctypes.CDLL(None).syscall(tgkill, running.pid, another, signal.SIGTERM) == 0
        assert running.wait(timeout=10) == 0


def test_a_process_that_cannot_end_its_calls_ends_all_the_same():
    forever = "from threading import Event; from kvdb.server.serve import end_within; end_within(0.1); Event().wait()"
    ended = subprocess.run([sys.executable, "-c", forever], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "ends with calls under way" in ended.stderr


def refused(target):
    """Whether a server takes no new client."""
    try:
        kvdb.connect(target).close()
    except errors.Unavailable:
        return True
    return False


def test_a_call_that_takes_longer_than_the_grace_is_ended(serve, spec, make_kv, engine):
    kv = make_kv(spec, 10)
    server = serve()

    def never():
        server.stop(grace=0.1)
        yield from kv.pairs()

    with kvdb.connect(server.target) as db, pytest.raises(errors.Unavailable):
        db.import_context(spec, kv.tokens, never(), name="doc")
    assert engine.contexts() == []


def test_stopping_leaves_no_thread_and_no_session(serve, spec, blocks_used):
    server = serve()
    with kvdb.connect(server.target) as db:
        sessions = [db.create_session(spec, [1, 2]) for _ in range(3)]
        for session in sessions:
            session.update(0, np.ones((2, 2, 16), np.float32), np.ones((2, 2, 16), np.float32))
        server.stop(grace=0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvdb-server")]
    assert not blocks_used()


def test_a_unix_socket(serve, tmp_path, spec):
    server = serve(host=f"unix:{tmp_path}/kvdb.sock")
    assert server.target == f"kvdb+unix://{tmp_path}/kvdb.sock"
    with kvdb.connect(server.target) as db, db.create_session(spec, [1]) as session:
        assert session.reused == 0


def test_a_port_that_is_taken(serve, engine):
    port = int(serve().target.rpartition(":")[2])
    with pytest.raises(errors.ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*port 0 for a free one"):
        Server(engine, ServerConfig(port=port))


def test_health_turns_with_the_server(serve):
    server = serve(token="secret")
    with grpc.insecure_channel(server.target.removeprefix("kvdb://")) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "kvdb.v1.Kvdb"):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
        assert next(watch).status == SERVING
        server.stop(grace=0.5)
        assert health_pb2.HealthCheckResponse.SERVING not in rest_of(watch)


def rest_of(watch):
    """The statuses that still come, until the server is gone."""
    with suppress(grpc.RpcError):
        return [reply.status for reply in watch]
    return []


@pytest.mark.parametrize("on", [True, False])
def test_reflection_stands_behind_its_flag(serve, on):
    server = serve(reflection=on)
    with grpc.insecure_channel(server.target.removeprefix("kvdb://")) as channel:
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        replies = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked)
        if on:
            names = {service.name for service in next(replies).list_services_response.service}
            assert {"kvdb.v1.Kvdb", "grpc.health.v1.Health"} <= names
        else:
            with pytest.raises(grpc.RpcError) as raised:
                next(replies)
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
