"""What happens on a server of tenants is told, whose it was, and in which request."""

import logging
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import indexes.registry as registry
import kvdb
from kvdb import errors
from kvdb.config import Config, IndexConfig, OptimizerConfig, ServerConfig, StorageConfig
from kvdb.config.quotas import QuotasConfig
from kvdb.database import Database
from kvdb.events import Kind
from kvdb.server.http.routes import Request
from kvdb.server.log import LEVELS, EventLog
from kvdb.server.metrics.opening import metrics_route
from kvdb.server.serve import Server
from kvdb.server.tenancy.tokens_file import new_token
from kvdb.session.state import SessionState
from tests.waiting import until

TOKENS = 1024
IN_BACKGROUND = {Kind.SESSION_EXPIRED, Kind.INDEX_BUILT, Kind.INDEX_FAILED, Kind.EXPIRED}
"""What no request of a client does."""
OF_NOBODY = {Kind.REFUSED, Kind.INDEX_BUILT, Kind.INDEX_FAILED, Kind.EXPIRED}
"""What belongs to no tenant, or to one whose name stands in the context's."""


@pytest.fixture
def served(tmp_path, spec):
    """A tenant of a server with little room, and what was told."""
    storage = StorageConfig(arena_bytes=1 << 20, cpu_bytes_max=3 << 20, disk_path=str(tmp_path / "disk"), disk_bytes_max=1 << 21)
    config = Config(
        storage=storage,
        quotas=QuotasConfig(sessions_max=3),
        indexes=IndexConfig(segment_tokens_min=64),
        optimizer=OptimizerConfig(rules_off=("short_context",)),
    )
    told, path = [], tmp_path / "tokens.json"
    token = new_token(path, "acme")
    with Database(config) as engine:
        engine.events.add(EventLog())
        engine.events.add(told.append)  # behind the log, so that what was told was written too
        server = Server(engine, ServerConfig(port=0, tokens_file=str(path)))
        server.start()
        try:
            with kvdb.connect(server.target, token=token) as db:
                yield db, told, server
        finally:
            server.stop(grace=0)


def stored(db, make_kv, spec, name, seed=0, **retention):
    kv = make_kv(spec, TOKENS, seed)
    return db.import_context(spec, kv.tokens, kv.pairs(), name=name, **retention)


@contextmanager
def broken(kind, name):
    def bug(*_given, **_more):
        raise RuntimeError("a bug")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, bug)
        yield


def use(db, spec, make_kv):
    stored(db, make_kv, spec, "doc")
    db.create_session(spec, [1]).close()
    db.drop("doc")


def expire(db, spec, make_kv):
    stored(db, make_kv, spec, "brief", ttl=0.05)
    until(lambda: not db.contexts())


def crowd(db, spec, make_kv):
    for number in range(12):
        stored(db, make_kv, spec, f"n{number}", seed=number)


def build(db, spec, make_kv):
    stored(db, make_kv, spec, "doc")
    db.build_index("doc", "flat")
    db.offload("doc")


def misbuild(db, spec, make_kv):
    stored(db, make_kv, spec, "doc")
    with broken(registry.KINDS["flat"], "build"), pytest.raises(errors.InternalError):
        db.build_index("doc", "flat")


def overdo(db, spec, _make_kv):
    sessions = []
    with pytest.raises(errors.QuotaExceeded):
        sessions.extend(db.create_session(spec, [1]) for _ in range(4))
    db.close_sessions(sessions)


def fail(db, spec, _make_kv):
    with broken(SessionState, "update"), db.create_session(spec, [1]) as session, suppress(errors.InternalError):
        session.update(0, np.ones((2, 1, 16), np.float32), np.ones((2, 1, 16), np.float32))


def knock(db, _spec, _make_kv):
    with pytest.raises(errors.Unauthenticated):
        kvdb.connect(db._transport._connection.target, token="wrong")


@pytest.mark.parametrize(
    ("act", "kinds"),
    [
        (use, {Kind.STORED, Kind.SESSION_OPENED, Kind.SESSION_CLOSED, Kind.DROPPED}),
        (expire, {Kind.EXPIRED}),
        (crowd, {Kind.EVICTED, Kind.OFFLOADED}),
        (build, {Kind.INDEX_BUILT, Kind.OFFLOADED}),
        (misbuild, {Kind.INDEX_FAILED}),
        (overdo, {Kind.QUOTA, Kind.REFUSED}),
        (fail, {Kind.FAILED}),
        (knock, {Kind.REFUSED}),
    ],
)
def test_it_is_told(served, spec, make_kv, caplog, act, kinds):
    db, told, _ = served
    with caplog.at_level(logging.DEBUG, "kvdb.events"):
        act(db, spec, make_kv)
        until(lambda: kinds <= {event.kind for event in told}, f"told were {told}")
    for event in told:
        if event.kind in kinds - OF_NOBODY:
            assert event.origin.tenant == "acme", event
        if event.kind in kinds - IN_BACKGROUND:
            assert event.origin.request, event
    levels = {record.getMessage(): record.levelno for record in caplog.records if record.name == "kvdb.events"}
    assert {kind: levels[kind] for kind in kinds} == {kind: LEVELS.get(kind, logging.INFO) for kind in kinds}


def search(db, spec, make_kv):
    stored(db, make_kv, spec, "doc")
    db.build_index("doc", "flat")
    with db.create_session(spec, make_kv(spec, TOKENS).tokens) as session:
        q = np.ones((4, 1, 16), np.float32)
        session.attention(0, q, retrieval=kvdb.TopK(4), hints=kvdb.Hints(index="flat"))


def bring_back(db, spec, make_kv):
    stored(db, make_kv, spec, "doc")
    db.offload("doc")
    with db.create_session(spec, make_kv(spec, TOKENS).tokens) as session:
        assert session.reused == TOKENS


def damage(db, spec, make_kv):
    stored(db, make_kv, spec, "doc")
    db.offload("doc")
    (folder,) = db.transport_disk.glob("*.segments")
    file = folder / "0.segment"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(errors.IntegrityError):
        db.verify("doc")


def measured(server):
    """The samples of the server's metrics."""
    families = text_string_to_metric_families(metrics_route(server.registry).handler(Request("/metrics")).body.decode())
    return {(sample.name, *sorted(sample.labels.values())): sample.value for family in families for sample in family.samples}


@pytest.mark.needs_folder
@pytest.mark.parametrize(
    ("act", "names"),
    [
        (
            crowd,
            [
                ("kvdb_evictions_total", "segment_offloaded"),
                ("kvdb_evictions_total", "context_evicted"),
                ("kvdb_tier_used_bytes", "disk"),
            ],
        ),
        (expire, [("kvdb_evictions_total", "context_expired")]),
        (build, [("kvdb_index_builds_total", "built"), ("kvdb_tier_used_bytes", "disk")]),
        (misbuild, [("kvdb_index_builds_total", "failed")]),
        (overdo, [("kvdb_quota_rejections_total", "acme", "sessions_max")]),
        (search, [("kvdb_missed_mass_total",), ("kvdb_missed_mass_bound_total",), ("kvdb_attend_stage_seconds_total", "search")]),
        (bring_back, [("kvdb_prompt_tokens_total", "disk")]),
        (damage, [("kvdb_checksum_failures_total",)]),
    ],
)
def test_what_is_measured_moves_by_its_cause(served, spec, make_kv, tmp_path, act, names):
    db, _, server = served
    db.transport_disk = tmp_path / "disk"
    before = measured(server)
    act(db, spec, make_kv)
    until(lambda: all(measured(server).get(name, 0) > before.get(name, 0) for name in names), f"of {names} one did not move")
    if act is search:
        assert 0 < measured(server)[("kvdb_retrieved_ratio",)] < 1


def test_a_session_that_expires_says_whose_it_was(served, spec):
    db, told, server = served
    _session = db.create_session(spec, [1])
    for sessions in server._tenants._registries():
        sessions._idle_seconds = 0.0
    server._tenants.close_idle()
    (event,) = (event for event in told if event.kind is Kind.SESSION_EXPIRED)
    assert event.origin.tenant == "acme"


@pytest.mark.needs_folder
def test_a_changed_file_is_told(served, spec, make_kv, tmp_path):
    db, told, _ = served
    db.transport_disk = tmp_path / "disk"
    damage(db, spec, make_kv)
    (event,) = (event for event in told if event.kind is Kind.CHECKSUM_FAILED)
    assert (event.origin.tenant, bool(event.origin.request)) == ("acme", True)
