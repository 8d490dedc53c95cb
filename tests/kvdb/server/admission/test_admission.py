"""The engine's door on a server: calls wait within bounds, no longer than they may, and leave nothing behind."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvdb
import kvdb.deadlines as deadlines
from kvdb import errors
from kvdb.config import ServerConfig
from kvdb.database import Database
from kvdb.server.admission.admission import Admission
from kvdb.server.admission.fair_queue import Work
from kvdb.server.serve import Server
from kvdb.session.state import SessionState
from tests.waiting import until

SECONDS_MAX = 20.0


def ones(*shape):
    return np.ones((*shape, 16), np.float32)


@pytest.fixture
def busy(monkeypatch):
    """Two events: the engine is at an update, and it may go on."""
    reached, opened = threading.Event(), threading.Event()
    update = SessionState.update

    def slowly(self, layer, k, v, start=None):
        reached.set()
        assert opened.wait(SECONDS_MAX)
        update(self, layer, k, v, start)

    monkeypatch.setattr(SessionState, "update", slowly)
    yield reached, opened
    opened.set()


@pytest.mark.parametrize("local_socket", ["auto", ""], ids=["shared memory", "gRPC"])
def test_what_finds_the_queue_full_is_refused_and_the_rest_is_done(engine, spec, busy, local_socket):
    reached, opened = busy
    server = Server(engine, ServerConfig(port=0, local_socket=local_socket, requests_max=1, queue_max=1))
    server.start()
    try:
        with kvdb.connect(server.target) as db, ThreadPoolExecutor(3) as threads:
            sessions = [db.create_session(spec, [1]) for _ in range(3)]
            first = threads.submit(sessions[0].update, 0, ones(2, 1), ones(2, 1))
            assert reached.wait(SECONDS_MAX)
            with pytest.raises(errors.DeadlineExceeded):
                sessions[1].update(0, ones(2, 1), ones(2, 1), timeout=0.2)
            until(lambda: not server._admission._queue)
            second = threads.submit(sessions[1].update, 0, ones(2, 1), ones(2, 1), start=0)
            until(lambda: len(server._admission._queue) == 1)
            with pytest.raises(errors.CapacityError, match=r"server\.queue_max"):
                sessions[2].update(0, ones(2, 1), ones(2, 1))
            opened.set()
            first.result(SECONDS_MAX)
            second.result(SECONDS_MAX)
            sessions[2].update(0, ones(2, 1), ones(2, 1))
            for session in sessions:
                assert session.attention(0, ones(4, 1)).shape == (4, 1, 16)
    finally:
        opened.set()
        server.stop(grace=0)
    assert not server._admission._queue
    assert server._admission._free >= 1


def test_unary_calls_wait_without_a_thread_and_are_refused_as_others(engine, spec, monkeypatch):
    reached, opened = threading.Event(), threading.Event()
    together = Database.attend

    def slowly(*arguments):
        reached.set()
        assert opened.wait(SECONDS_MAX)
        return together(*arguments)

    monkeypatch.setattr(Database, "attend", slowly)
    server = Server(engine, ServerConfig(port=0, local_socket="", requests_max=1, queue_max=1))
    server.start()
    try:
        with kvdb.connect(server.target) as db, ThreadPoolExecutor(3) as threads:
            sessions = [db.create_session(spec, [1]) for _ in range(3)]
            arrays = ones(1, 4, 1), ones(1, 2, 1), ones(1, 2, 1)
            first = threads.submit(db.attend, [sessions[0]], 0, *arrays)
            assert reached.wait(SECONDS_MAX)
            with pytest.raises(errors.DeadlineExceeded):
                db.attend([sessions[1]], 0, *arrays, timeout=0.2)
            second = threads.submit(db.attend, [sessions[2]], 0, *arrays)  # takes the place of the one whose time is over
            until(lambda: len(server._admission._queue) == 1)
            opened.set()
            assert first.result(SECONDS_MAX).shape == second.result(SECONDS_MAX).shape == (1, 4, 1, 16)
            assert db.attend([sessions[1]], 0, *arrays, starts=[0]).shape == (1, 4, 1, 16), "it had no effect"
    finally:
        opened.set()
        server.stop(grace=0)


def test_the_tenant_that_was_served_least_goes_first():
    door, order = Admission(1, 100), []
    running = Work("greedy", 100)
    assert door.begin(running, lambda: None)
    for number in range(3):
        work = Work("greedy", 100)
        assert not door.begin(work, lambda work=work, number=number: order.append((number, work)))
    modest = Work("modest", 1)
    assert not door.begin(modest, lambda: order.append(("modest", modest)))
    door.end(running)
    for _ in range(4):
        door.end(order[-1][1])
    assert [name for name, _ in order] == [0, "modest", 1, 2], "both had been counted 100 when the second came"


def test_who_waits_too_long_takes_no_place():
    door = Admission(1, 1)
    work = Work("a")
    door.wait(work)
    with deadlines.within(0.05), pytest.raises(errors.DeadlineExceeded):
        door.wait(Work("b"))
    door.end(work)
    with door.admitted(Work("b")):
        assert not door.begin(Work("c"), lambda: None)


def test_many_threads_never_exceed_the_bound():
    door, lock, now, most = Admission(3, 1000), threading.Lock(), [0], [0]

    def call(number):
        for _ in range(50):
            with door.admitted(Work(str(number % 3), number + 1, number % 2)):
                with lock:
                    now[0] += 1
                    most[0] = max(most[0], now[0])
                with lock:
                    now[0] -= 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(call, range(8)))
    assert most[0] <= 3
    assert door._free == 3


@pytest.mark.parametrize(("name", "value"), [("requests_max", 0), ("queue_max", -1)])
def test_settings_that_cannot_be(name, value):
    with pytest.raises(errors.ConfigError, match=f"server.{name}"):
        ServerConfig(**{name: value})
