"""A tenant has no more than it may, over either transport; what it gives back is free again, and others notice nothing."""

import threading
import time
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

import kvdb
from kvdb import errors
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.config.quotas import QuotasConfig
from kvdb.events import Events, Kind
from kvdb.server.admission.admission import Admission
from kvdb.server.admission.fair_queue import Work
from kvdb.server.serve import Server
from kvdb.server.tenancy.quota import Holdings, Quota
from kvdb.server.tenancy.tokens_file import new_token
from tests.database import database

TENANTS = ("acme", "globex")
TOKENS = 100


@pytest.fixture(params=["", "auto"], ids=["grpc", "shared memory"])
def clients(request, tmp_path):
    """`clients(**quotas)`: the clients of two tenants of a server with these quotas, and what it told."""
    opened = []

    def start(disk_path="", store="", **quotas):
        engine = database(config=Config(quotas=QuotasConfig(**quotas), storage=StorageConfig(disk_path=disk_path, path=store)))
        told = []
        held = engine.__enter__()
        held.events.add(told.append)
        path = tmp_path / "tokens.json"
        tokens = [new_token(path, tenant) for tenant in TENANTS]
        server = Server(held, ServerConfig(port=0, tokens_file=str(path), local_socket=request.param))
        server.start()
        each = [kvdb.connect(server.target, token=token) for token in tokens]
        opened.append((engine, server, each))
        return each, told, server

    yield start
    for engine, server, each in opened:
        for one in each:
            one.close()
        server.stop(grace=0)
        engine.__exit__(None, None, None)


def stored(db, kv, name):
    return db.import_context(kv.spec, kv.tokens, kv.pairs(), name=name)


def refused(call, quota):
    with pytest.raises(errors.QuotaExceeded, match=rf"quotas\.{quota}"):
        call()


def test_contexts(clients, spec, make_kv):
    (acme, globex), told, server = clients(contexts_max=2)
    kv = make_kv(spec, TOKENS)
    for name in ("a", "b"):
        stored(acme, kv, name)
    refused(lambda: stored(acme, kv, "c"), "contexts_max")
    stored(globex, kv, "a")
    with acme.create_session(spec, kv.tokens) as session:
        refused(lambda: session.store(name="c"), "contexts_max")
        acme.drop("a")
        session.store(name="c")
    (event, again) = (event for event in told if event.kind is Kind.QUOTA)
    assert event.origin.tenant == "acme"
    assert dict(event.facts) == {"quota": "contexts_max", "used": 2, "asked": 1, "most": 2}
    lines = generate_latest(server.registry).decode().splitlines()
    assert 'kvdb_quota_rejections_total{quota="contexts_max",tenant="acme"} 2.0' in lines
    assert 'kvdb_quota_rejections_total{quota="room",tenant=""} 0.0' in lines
    assert again.origin.request


def test_bytes(clients, spec, make_kv):
    one = TOKENS * spec.token_nbytes * spec.layers
    (acme, globex), _, _ = clients(bytes_max=5 * one // 2)
    kvs = [make_kv(spec, TOKENS, seed=seed) for seed in range(3)]
    for number in range(2):
        stored(acme, kvs[number], f"{number}")
    refused(lambda: stored(acme, kvs[2], "2"), "bytes_max")
    stored(globex, kvs[2], "2")
    acme.drop("0")
    stored(acme, kvs[2], "2")


def test_bytes_in_main_memory_count_sessions_too(clients, spec, make_kv):
    one = TOKENS * spec.token_nbytes * spec.layers
    (acme, _), _, _ = clients(cpu_bytes_max=3 * one)
    kv = make_kv(spec, TOKENS)
    stored(acme, kv, "a")
    with acme.create_session(spec, [1]) as session:
        for layer, (k, v) in enumerate(kv.pairs()):
            session.update(layer, k, v)
        refused(lambda: stored(acme, make_kv(spec, TOKENS, seed=1), "b"), "cpu_bytes_max")
    stored(acme, make_kv(spec, TOKENS, seed=1), "b")


def test_bytes_on_disk(clients, spec, make_kv, tmp_path):
    one = -(-TOKENS // 64) * 64 * spec.token_nbytes * spec.layers
    (acme, globex), _, _ = clients(disk_bytes_max=5 * one // 2, disk_path=str(tmp_path / "disk"))
    for number in range(4):
        stored(acme, make_kv(spec, TOKENS, seed=number), f"{number}")
    for name in "01":
        acme.offload(name)
    acme.offload("0")
    refused(lambda: acme.offload("2"), "disk_bytes_max")
    stored(globex, make_kv(spec, TOKENS, seed=9), "0")
    globex.offload("0")
    acme.drop("0")
    acme.offload("2")


def test_what_a_store_writes_is_on_disk(clients, spec, make_kv, tmp_path):
    one = -(-TOKENS // 64) * 64 * spec.token_nbytes * spec.layers
    (acme, _), _, _ = clients(disk_bytes_max=5 * one // 2, store=str(tmp_path / "store"))
    kvs = [make_kv(spec, TOKENS, seed=seed) for seed in range(4)]
    for number in range(2):
        stored(acme, kvs[number], f"{number}")
    refused(lambda: stored(acme, kvs[2], "2"), "disk_bytes_max")
    acme.import_context(spec, kvs[2].tokens, kvs[2].pairs(), name="2", durability="memory")
    acme.drop("1")
    stored(acme, kvs[3], "3")


def test_an_import_that_fails_gives_its_room_back(clients, spec, make_kv):
    (acme, _), _, _ = clients(contexts_max=1)
    kv = make_kv(spec, TOKENS)

    def broken():
        yield kv.pairs()[0]
        raise RuntimeError("the model failed")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            acme.import_context(spec, kv.tokens, broken(), name="a")
    stored(acme, kv, "a")


def test_sessions(clients, spec):
    (acme, globex), _, _ = clients(sessions_max=2)
    first, second = (acme.create_session(spec, [1]) for _ in range(2))
    refused(lambda: acme.create_session(spec, [1]), "sessions_max")
    refused(first.fork, "sessions_max")
    globex.create_session(spec, [1]).close()
    second.close()
    first.fork().close()
    first.close()


def test_imports_wait_for_their_rate(clients, spec, make_kv):
    nbytes = TOKENS * spec.token_nbytes * spec.layers
    (acme, _), _, _ = clients(import_bytes_per_second=2 * nbytes)
    started = time.monotonic()
    for number in range(3):
        stored(acme, make_kv(spec, TOKENS, seed=number), f"{number}")
    assert 0.4 < time.monotonic() - started < 10


def test_requests():
    told, events = [], Events()
    events.add(told.append)
    admission = Admission(1, 10, tenant_max=lambda _tenant: 2, events=events)
    one, other = Work("acme"), Work("globex")
    assert admission.begin(one, print)
    assert not admission.begin(one, print)
    with pytest.raises(errors.QuotaExceeded, match=r"quotas\.requests_max"):
        admission.begin(one, print)
    assert not admission.begin(other, print)
    assert [event.facts["quota"] for event in told] == ["requests_max"]
    admission.end(one)
    assert not admission.begin(one, print)


@settings(max_examples=60)
@given(
    actions=st.lists(st.tuples(st.sampled_from(["announce", "store", "fail", "drop"]), st.integers(1, 50)), max_size=30),
    most=st.integers(1, 4),
    nbytes=st.integers(10, 120),
)
def test_no_order_of_calls_passes_a_limit(actions, most, nbytes):
    """What is stored and what is announced never are more than the limits together, and both end at nothing."""
    quota = Quota(QuotasConfig(contexts_max=most, bytes_max=nbytes), "acme", Events())
    coming, kept = [], []

    def held():
        return Holdings(len(kept), sum(kept), sum(kept))

    for action, size in actions:
        if action == "announce":
            fits = len(coming) + len(kept) < most and sum(coming) + sum(kept) + size <= nbytes
            try:
                quota.announce(Holdings(1, size), held)
                coming.append(size)
                assert fits
            except errors.QuotaExceeded:
                assert not fits
        elif action == "drop" and kept:
            kept.pop()
        elif coming and action != "drop":
            done = coming.pop()
            quota.done(Holdings(1, done))
            kept.extend([done] if action == "store" else [])
        assert len(coming) + len(kept) <= most
        assert sum(coming) + sum(kept) <= nbytes
    while coming:
        quota.done(Holdings(1, coming.pop()))
    kept.clear()
    quota.announce(Holdings(1, min(nbytes, 10)), held)


def test_announcements_at_once_pass_no_limit():
    quota = Quota(QuotasConfig(contexts_max=5), "acme", Events())
    taken = []

    def announce():
        try:
            quota.announce(Holdings(1), Holdings)
            taken.append(1)
        except errors.QuotaExceeded:
            pass

    threads = [threading.Thread(target=announce) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 5


@pytest.mark.parametrize("name", [field.name for field in fields(QuotasConfig)])
def test_a_negative_limit_is_refused(name):
    with pytest.raises(errors.ConfigError, match=rf"quotas\.{name}"):
        QuotasConfig(**{name: -1})


def test_nobody_is_limited_who_runs_the_server(spec, make_kv):
    with database(config=Config(quotas=QuotasConfig(contexts_max=1))) as engine:
        server = Server(engine, ServerConfig(port=0, local_socket=""))
        server.start()
        with kvdb.connect(server.target) as db:
            for number in range(2):
                stored(db, make_kv(spec, 3, seed=number), f"{number}")
        server.stop(grace=0)


def test_single_tenants_have_limits_of_their_own(clients, spec, make_kv):
    (acme, globex), _, server = clients(contexts_max=1, tenants=("globex.contexts_max=2", "globex.requests_max=7"))
    kv = make_kv(spec, TOKENS)
    stored(acme, kv, "a")
    refused(lambda: stored(acme, kv, "b"), "contexts_max=1")
    for name in ("a", "b"):
        stored(globex, kv, name)
    refused(lambda: stored(globex, kv, "c"), "contexts_max=2")
    assert [server._admission._tenant_max(tenant) for tenant in TENANTS] == [0, 7]


def test_limits_of_single_tenants_are_read_with_units():
    quotas = QuotasConfig(bytes_max=10, tenants=("a.b.bytes_max = 8GiB", "c.sessions_max=0", "a.b.contexts_max=3"))
    assert quotas.of("a.b") == QuotasConfig(bytes_max=8 << 30, contexts_max=3)
    assert quotas.of("c") == quotas.of("nobody") == QuotasConfig(bytes_max=10)


@pytest.mark.parametrize(
    "wrong", ["", "contexts_max=1", ".contexts_max=1", "a.contexts=1", "a.contexts_max", "a.contexts_max=many", "a.tenants=b",
              "a.contexts_max=-1", "a.bytes_max=1.5B"]
)  # fmt: skip
def test_limits_of_single_tenants_that_cannot_be(wrong):
    with pytest.raises(errors.ConfigError, match=r"quotas\.(tenants|bytes_max|contexts_max)"):
        QuotasConfig(tenants=(wrong,))
