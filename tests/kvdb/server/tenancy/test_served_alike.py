"""Tenants that always want something are served alike by a real server, whatever the number of their threads, and calls on the
same stored segment go next to each other."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvdb
from kvdb.config import ServerConfig
from kvdb.events import origin
from kvdb.server.serve import Server
from kvdb.server.tenancy.tokens_file import new_token
from kvdb.session.state import SessionState
from tests.waiting import until

SECONDS_MAX = 20.0
TENANTS = ("flood", "quiet")


@pytest.fixture
def served(monkeypatch):
    """What the engine answered, in order: whose call and of which session. The first waits until it is told to go on."""
    order, reached, opened = [], threading.Event(), threading.Event()
    attend = SessionState.attend

    def noted(self, *given, **named):
        reached.set()
        assert opened.wait(SECONDS_MAX)
        order.append((origin().tenant, self.reused))
        return attend(self, *given, **named)

    monkeypatch.setattr(SessionState, "attend", noted)
    yield order, reached, opened
    opened.set()


@pytest.fixture(params=["", "auto"], ids=["grpc", "shared memory"])
def server(request, engine, tmp_path):
    path = tmp_path / "tokens.json"
    tokens = {tenant: new_token(path, tenant) for tenant in TENANTS}
    config = ServerConfig(port=0, tokens_file=str(path), local_socket=request.param, requests_max=1)
    started = Server(engine, config)
    started.start()
    yield started, tokens
    started.stop(grace=0)


def test_a_flood_of_one_tenant_delays_another_by_what_is_under_way(server, served, spec):
    started, tokens = server
    order, reached, opened = served
    q, k = np.ones((4, 1, 16), np.float32), np.ones((2, 1, 16), np.float32)
    flood = [kvdb.connect(started.target, token=tokens["flood"]) for _ in range(3)]
    quiet = kvdb.connect(started.target, token=tokens["quiet"])
    with ThreadPoolExecutor(16) as threads:
        sessions = [db.create_session(spec, [1]) for db in flood for _ in range(4)]
        mine = [quiet.create_session(spec, [1]) for _ in range(3)]
        calls = [threads.submit(sessions[0].attend, 0, q, k, k)]
        assert reached.wait(SECONDS_MAX)
        calls += [threads.submit(session.attend, 0, q, k, k) for session in sessions[1:]]
        until(lambda: len(started._admission._queue) == len(sessions) - 1)
        calls += [threads.submit(session.attend, 0, q, k, k) for session in mine]
        until(lambda: len(started._admission._queue) == len(sessions) - 1 + len(mine))
        opened.set()
        for call in calls:
            call.result(SECONDS_MAX)
    for db in (*flood, quiet):
        db.close()
    whose = [tenant for tenant, _ in order]
    assert len(whose) == len(sessions) + len(mine)
    places = [place for place, tenant in enumerate(whose) if tenant == "quiet"]
    assert places[0] <= 2, "behind what was under way, and at most one more"
    assert all(after - before <= 2 for before, after in itertools.pairwise(places)), whose


def test_calls_on_one_stored_segment_go_next_to_each_other(server, served, spec, make_kv):
    started, tokens = server
    order, reached, opened = served
    q, k = np.ones((4, 1, 16), np.float32), np.ones((2, 1, 16), np.float32)
    kvs = make_kv(spec, 16, seed=1), make_kv(spec, 32, seed=2)
    with kvdb.connect(started.target, token=tokens["quiet"]) as db, ThreadPoolExecutor(8) as threads:
        for name, kv in zip("ab", kvs, strict=True):
            db.import_context(spec, kv.tokens, kv.pairs(), name=name)
        other = db.create_session(spec, [1])
        sessions = [db.create_session(spec, kvs[n % 2].tokens) for n in range(4)]
        calls = [threads.submit(other.attend, 0, q, k, k)]
        assert reached.wait(SECONDS_MAX)
        for n, session in enumerate(sessions):
            calls.append(threads.submit(session.attend, 0, q, k, k))
            until(lambda: len(started._admission._queue) == n + 1)  # noqa: B023
        opened.set()
        for call in calls:
            call.result(SECONDS_MAX)
    assert [reused for _, reused in order] == [0, 16, 16, 32, 32], "they came in turns"
