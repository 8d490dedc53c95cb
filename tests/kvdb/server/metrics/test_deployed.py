"""The dashboard and the alert rules name nothing that a running server does not offer."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvdb
from kvdb.config import Config, StorageConfig
from kvdb.database import Database
from kvdb.server.http.routes import Request
from kvdb.server.metrics.events import EventCounts
from kvdb.server.metrics.opening import metrics_route, open_registry

DEPLOY = Path(__file__).parents[4] / "deploy"
OF_PROMETHEUS = {"up": {"job", "instance"}}
"""Metrics that Prometheus itself makes, with their labels."""
OF_SCRAPES = {"job", "instance", "le"}


@pytest.fixture
def offered(serve, spec, make_kv):
    """The labels of every sample of a server that has answered something, by name."""
    kv = make_kv(spec, 8)
    server = serve()
    with kvdb.connect(server.target) as db:
        db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        session = db.create_session(spec, kv.tokens)
        session.attend(0, kv.q[0], *kv.pairs()[0])
        db.contexts()
    limited = Database(Config(storage=StorageConfig(cpu_bytes_max=1 << 24)))
    labels = {name: set(found) for name, found in OF_PROMETHEUS.items()}
    for registry in (server.registry, open_registry(limited)):
        page = metrics_route(registry).handler(Request("/metrics")).body.decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
    limited.close()
    return labels


def expressions(name):
    text = (DEPLOY / name).read_text()
    if name.endswith(".json"):
        board = json.loads(text)
        return [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return re.findall(r"^ +expr: (.+)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["grafana/kvdb.json", "prometheus/alerts.yml"])
def test_every_metric_and_label_is_offered(offered, name):
    asked = expressions(name)
    assert len(asked) >= 9
    for expression in asked:
        metrics = re.findall(r"\b(kvdb_\w+|up)\b(?:\{([^}]*)\})?", expression)
        assert metrics, expression
        known = set(OF_SCRAPES)
        for metric, matchers in metrics:
            assert metric in offered, expression
            known |= offered[metric]
            assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= offered[metric] | OF_SCRAPES, expression
        for grouping in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", expression):
            assert {label.strip() for label in grouping.split(",")} <= known, expression


def test_every_value_that_a_rule_waits_for_is_one_that_can_come(offered):
    values = {}
    for family in EventCounts().collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                values.setdefault((sample.name, label), set()).add(value)
    for expression in [*expressions("grafana/kvdb.json"), *expressions("prometheus/alerts.yml")]:
        for metric, label, value in re.findall(r'(kvdb_(?:evictions|index_builds)_total)\{(\w+)="(\w+)"', expression):
            assert value in values[metric, label], expression
