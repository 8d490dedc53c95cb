"""What is measured says what was done."""

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvdb
from kvdb import errors
from kvdb.config import Config, StorageConfig
from kvdb.database import Database
from kvdb.events import Kind
from kvdb.server.http.routes import Request
from kvdb.server.metrics.calls import METHODS
from kvdb.server.metrics.database import DatabaseCollector
from kvdb.server.metrics.opening import metrics_route
from kvdb.types import TierStats


@pytest.fixture
def read(serve):
    """`read(**settings)` starts a server: its address, and a function that reads `{(name, labels): value}`."""

    def start(**settings):
        server = serve(**settings)
        page = metrics_route(server.registry).handler

        def values():
            families = text_string_to_metric_families(page(Request("/metrics")).body.decode())
            return {
                (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
            }

        return server, values

    return start


def test_attends_and_their_stages_are_counted_while_a_session_is_open_and_after(read, spec, make_kv):
    server, values = read()
    kv = make_kv(spec, 40)
    with kvdb.connect(server.target) as db:
        session = db.create_session(spec, kv.tokens)
        for layer in range(spec.layers):
            session.attend(layer, kv.q[layer], *kv.pairs()[layer])
            session.attention(layer, kv.q[layer][:, -1:])
        seen = values()
        session.close()
        after = values()
    attends = sum(value for key, value in seen.items() if key[0] == "kvdb_attends_total")
    assert attends == 2 * spec.layers
    assert seen["kvdb_context_tokens_total",] == seen["kvdb_retrieved_tokens_total",] == 2 * spec.layers * 40
    assert seen["kvdb_retrieved_ratio",] == 1
    assert seen["kvdb_attend_stage_seconds_total", ("stage", "attend")] > 0
    assert seen["kvdb_attend_stage_seconds_total", ("stage", "plan")] > 0
    assert (seen["kvdb_sessions_open",], after["kvdb_sessions_open",]) == (1, 0)
    totals = [key for key in seen if key[0].startswith(("kvdb_attend", "kvdb_retrieved_tokens", "kvdb_read"))]
    assert {key: after[key] for key in totals} == {key: seen[key] for key in totals}
    assert seen["kvdb_decode_seconds_count", ("call", "attend")] == spec.layers
    assert seen["kvdb_queue_seconds_count",] >= 2 * spec.layers


def test_prompts_count_by_where_their_tokens_were_found(read, spec, make_kv):
    server, values = read()
    kv = make_kv(spec, 64)
    with kvdb.connect(server.target) as db:
        db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        db.create_session(spec, np.concatenate([kv.tokens, kv.tokens[:6]])).close()
    found = {tier: values()["kvdb_prompt_tokens_total", ("tier", tier)] for tier in ("cpu", "disk", "none")}
    assert found == {"cpu": 64, "disk": 0, "none": 6}
    assert values()["kvdb_tier_used_bytes", ("tier", "cpu")] > 0
    assert values()["kvdb_events_total", ("event", "context_stored")] == 1


def test_a_tier_is_told_with_its_limit_and_with_all_that_lies_in_its_memory(monkeypatch):
    gpu, tables = TierStats("gpu", 3, 8, 1024, 8192, huge=False), TierStats("gpu tables", 0, 0, 0, 100, huge=False)
    with Database(Config(storage=StorageConfig(gpu_bytes_max=1 << 20))) as database:
        monkeypatch.setattr(database, "tiers", lambda: [gpu, tables])
        told = {
            (sample.name, *sample.labels.values()): sample.value
            for family in DatabaseCollector(database).collect()
            for sample in family.samples
            if "tier" in sample.labels and sample.name.startswith("kvdb_tier")
        }
    assert told == {
        ("kvdb_tier_used_bytes", "gpu"): 3072,
        ("kvdb_tier_bytes", "gpu"): 8292,
        ("kvdb_tier_limit_bytes", "gpu"): 1 << 20,
    }


def test_refused_calls_count_by_status(read, eventually):
    server, values = read(token="s3cret")
    with pytest.raises(errors.Unauthenticated):
        kvdb.connect(server.target, token="wrong").contexts()
    eventually(lambda: values()["kvdb_events_total", ("event", "call_refused")] >= 1)
    assert any(key[0] == "kvdb_calls_total" and ("code", "UNAUTHENTICATED") in key for key in values())


def test_the_number_of_series_does_not_grow_with_contexts_sessions_and_methods(read, engine, spec, make_kv):
    server, values = read()
    kv = make_kv(spec, 4)
    with kvdb.connect(server.target) as db:
        db.import_context(spec, kv.tokens, kv.pairs(), name="first")
        db.create_session(spec, kv.tokens).close()
        db.drop("first")
        before = set(values())
        for number in range(10_000):
            engine.events.tell(Kind.STORED, context=f"context {number}", tenant=f"tenant {number}")
            server._measured.ended(f"/kvdb.v1.Kvdb/Unknown{number}", grpc.StatusCode.UNIMPLEMENTED, 0.0)
        grown = set(values()) - before
    assert {key[0] for key in grown} <= {"kvdb_calls_total", "kvdb_calls_created"} | {
        f"kvdb_call_seconds_{what}" for what in ("bucket", "count", "sum", "created")
    }
    assert {dict(key[1:])["method"] for key in grown} <= {"other", *METHODS.values()}
