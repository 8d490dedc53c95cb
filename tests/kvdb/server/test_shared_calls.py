"""Calls through shared memory are watched, bounded and kept to their user as those over gRPC are."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import kvdb
import kvdb.deadlines as deadlines
from kvdb import errors
from kvdb.client.remote.shared_memory.lane import SharedLane
from kvdb.events import Kind, origin
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.shared_records import address_of
from kvdb.server.each_session import statuses_within
from kvdb.server.service import KvdbService
from kvdb.session.state import SessionState
from tests.waiting import until


@pytest.fixture
def server(serve):
    return serve(local_socket="auto")


@pytest.fixture
def session(server, spec):
    with kvdb.connect(server.target) as db, db.create_session(spec, [1]) as opened:
        yield opened


def test_the_socket_lies_in_no_folder(server, stub_of):
    path = stub_of(server).Hello(pb.HelloRequest()).local_socket
    assert address_of(path) == "\0" + path[1:]
    assert path.startswith("@kvdb-")
    assert path in Path("/proc/net/unix").read_text()


def test_another_user_is_not_let_in(server, stub_of, monkeypatch):
    hello = stub_of(server).Hello(pb.HelloRequest())
    monkeypatch.setattr("kvdb.server.shared_memory.listener.user_of", lambda _peer: os.geteuid() + 1)
    with pytest.raises(errors.Unavailable):
        SharedLane(hello.local_socket, hello.local_server, "")


def test_a_failure_is_told_with_whose_it_was(session, server, engine, spec, make_kv, monkeypatch):
    told, kv = [], make_kv(spec, 2)
    engine.events.add(told.append)

    def bug(*_given, **_more):
        raise RuntimeError("a bug")

    monkeypatch.setattr(SessionState, "update", bug)
    with pytest.raises(errors.InternalError, match="a bug"):
        session.update(0, *kv.pairs()[0])
    (event,) = (event for event in told if event.kind == Kind.FAILED)
    assert (event.facts["method"], event.facts["code"]) == ("update", "INTERNAL")
    assert len(event.origin.request) == 16
    assert server.registry.get_sample_value("kvdb_calls_total", {"method": "SharedMemory", "code": "INTERNAL"}) == 1


def test_the_time_of_a_call_reaches_the_engine(session, spec, make_kv, monkeypatch):
    seen, kv, update = [], make_kv(spec, 2), SessionState.update

    def watched(self, *given):
        seen.append((deadlines.remaining(), origin().request))
        update(self, *given)

    monkeypatch.setattr(SessionState, "update", watched)
    session.update(0, *kv.pairs()[0])
    session.update(1, *kv.pairs()[1], timeout=5.0)
    (default, first), (own, second) = seen
    assert own <= 5.0 < default
    assert first != second


def test_a_server_that_is_killed_in_a_call_is_found_out_soon(process, spec):
    with process() as (running, line), kvdb.connect(line.split()[-1]) as db, db.create_session(spec, [1]) as session:
        k = np.ones((2, 1, 16), np.float32)
        session.update(0, k, k)
        killed, waits = [], []

        def kill():
            running.send_signal(signal.SIGKILL)
            running.wait()
            killed.append(time.monotonic())

        running.send_signal(signal.SIGSTOP)
        until(lambda: Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        lane = session._transport.shared._lanes.take()
        ring = lane.region.ring
        session._transport.shared._lanes.give_back(lane)
        session._transport.shared._lanes._free[0].region.ring = Killing(ring, kill, waits)
        with pytest.raises(errors.Unavailable):
            session.update(0, k, k)
        assert time.monotonic() - killed[0] < 5.0
        assert max(waits) <= 0.02


class Killing:
    """A ring of which the first wait finds the server killed behind it. waits: the seconds of each."""

    def __init__(self, ring, kill, waits):
        self._ring = ring
        self._waits = waits
        self._kill = kill

    def __getattr__(self, name):
        return getattr(self._ring, name)

    def receive(self, seconds):
        self._waits.append(seconds)
        data = self._ring.receive(seconds)
        if self._kill is not None:
            self._kill()
            self._kill = None
        return data


def test_updates_of_several_sessions_go_through_it(server, spec, make_kv, monkeypatch):
    monkeypatch.setattr(KvdbService, "update_sessions", None)
    kv, count = make_kv(spec, 2), 3
    k, v = (np.stack([array] * count) for array in kv.pairs()[0])
    with kvdb.connect(server.target) as db:
        sessions = db.create_sessions(spec, [[i] for i in range(count)])
        assert db.update_sessions(sessions, 0, k, v) == [None] * count
        sessions[1].truncate(0)
        first, emptied, last = db.update_sessions(sessions, 0, k, v, starts=[2, 2, 2])
        assert (first, type(emptied), last) == (None, errors.PositionError, None)
        assert db.update_sessions(sessions, 0, k, v, starts=[4, 0, 4]) == [None] * count


def test_many_long_errors_are_cut_to_their_room():
    ended = [None, *(errors.InvalidArgument("€" * 400) for _ in range(99))]
    reply = statuses_within(ended, 100 * 200)
    assert 0.5 * 20_000 < reply.ByteSize() <= 20_000
    assert [status.error for status in reply.statuses] == ["", *["InvalidArgument"] * 99]
    assert set(reply.statuses[1].text) == {"€"}
    assert statuses_within(ended, 1 << 20).statuses[1].text == "€" * 400
    with pytest.raises(errors.InvalidArgument):
        statuses_within(ended, 100)
