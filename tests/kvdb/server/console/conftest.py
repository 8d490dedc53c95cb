"""A console over a small database: contexts that share segments, an index, queries that searched it, and a session."""

import json
from http.client import HTTPConnection
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import kvdb
from kvdb.config import Config, IndexConfig, MetricsConfig, OptimizerConfig, ServerConfig, StorageConfig, WindowConfig
from kvdb.database import Database
from kvdb.server.console.access import View
from kvdb.server.console.console import Console
from kvdb.server.http.opening import open_http
from kvdb.server.metrics.calls import CallMetrics
from kvdb.server.tenancy.credentials import Credentials
from kvdb.types import Retention
from query_optimizer.query_options import QueryOptions

SPEC = kvdb.ModelSpec("tiny", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")
HOSTILE = "<img src=x onerror=alert(1)>"
BASE, NOTES, AWAY = "handbook", "handbook/notes", "away"
TOKEN = "s3cret"
SECONDS_MAX = 5.0


class Answer(NamedTuple):
    """What a port answered. value: of JSON, else None."""

    status: int
    headers: dict[str, str]
    body: bytes
    value: object


def ask(url, path, token=None, **query):
    """The answer of a port to GET of a path."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname, address.port, timeout=SECONDS_MAX)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request("GET", f"{path}?{urlencode(query)}" if query else path, headers=headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    value = json.loads(body) if reply.headers["Content-Type"] == "application/json" else None
    return Answer(reply.status, dict(reply.headers), body, value)


def store(database, name, tokens, rng, retention=None):
    """Import a context of random KV, with queries that its indexes may learn from."""
    with_retention = {} if retention is None else {"retention": retention}
    writer = database.begin_import(SPEC, tokens, name, **with_retention)
    for layer in range(SPEC.layers):
        k, v = rng.standard_normal((2, SPEC.kv_heads, len(tokens) - writer.start, SPEC.head_dim)).astype(np.float32)
        writer.sample(layer, rng.standard_normal((SPEC.q_heads, 4, SPEC.head_dim)).astype(np.float32))
        writer.write(layer, k, v)
    writer.commit()


def fill(database):
    """What the tests look at; returns an open session."""
    rng = np.random.default_rng(3)
    base = rng.integers(0, 1000, 320).astype(np.int32)
    store(database, BASE, base, rng, Retention(pinned=True, metadata={"team": "legal"}))
    store(database, NOTES, np.concatenate([base, rng.integers(0, 1000, 96).astype(np.int32)]), rng)
    store(database, HOSTILE, rng.integers(0, 1000, 40).astype(np.int32), rng)
    store(database, AWAY, rng.integers(0, 1000, 40).astype(np.int32), rng)
    database.offload(AWAY)
    database.build_index(BASE, "flat")
    session = database.create_session(SPEC, base, label="chat")
    options = QueryOptions(retrieval=kvdb.Dipr(0.2))
    for layer in range(SPEC.layers):
        for _ in range(3):
            q = 4 * rng.standard_normal((SPEC.q_heads, 1, SPEC.head_dim)).astype(np.float32)
            k = rng.standard_normal((SPEC.kv_heads, 1, SPEC.head_dim)).astype(np.float32)
            session.attend(layer, q, k, k, options)
    return session


def small(disk_path):
    return Config(
        storage=StorageConfig(arena_bytes=1 << 20, cpu_bytes_max=64 << 20, disk_path=str(disk_path)),
        optimizer=OptimizerConfig(rules_off=("short_context",), machine_file=""),
        window=WindowConfig(4, 16),
        indexes=IndexConfig(on_demand="", automatic=False, segment_tokens_min=64),
    )


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    with Database(small(tmp_path_factory.mktemp("disk"))) as opened:
        session = fill(opened)
        yield opened
        session.close()


@pytest.fixture(scope="module")
def open_console():
    """`open_console(database, token="", measured=None)` is the URL of a port with the console. measured: of calls."""
    opened = []

    def start(database, token="", measured=None):
        config = Config(server=ServerConfig(token=token), metrics=MetricsConfig(port=0))
        credentials = Credentials(config.server)
        calls = CallMetrics(CollectorRegistry()) if measured is None else measured
        routes = Console(lambda given: credentials.of_token(given.encode()) and View(database, calls)).routes()
        opened.append(open_http(config, lambda: True, routes, credentials))
        opened[-1].start()
        return opened[-1].url

    yield start
    for port in opened:
        port.stop()


@pytest.fixture(scope="module")
def url(open_console, database):
    return open_console(database)


@pytest.fixture(scope="module")
def locked_url(open_console, database):
    return open_console(database, TOKEN)
