"""How a server is used at the moment, for whoever runs it and for a tenant."""

import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.config import ServerConfig
from kvdb.server.serve import Server
from kvdb.server.tenancy.tokens_file import new_token
from kvdb.version import __version__
from tests.database import database, small_config
from tests.waiting import until


@pytest.fixture
def engine():
    with database(config=small_config()) as opened:
        yield opened


def test_it_counts_what_there_is(client, engine, spec, make_kv):
    kv = make_kv(spec, 200)
    before = client.status()
    assert (before.version, before.contexts, before.sessions, before.indexes) == (__version__, 0, 0, {})
    for name in ("a", "b"):
        client.import_context(spec, kv.tokens, kv.pairs(), name=name)
    client.build_index("a", "flat", wait=True)
    with client.create_session(spec, kv.tokens):
        now = client.status()
        assert (now.contexts, now.sessions, now.indexes, now.building) == (2, 1, {"flat": 1}, 0)  # they share a segment
        assert (now.calls, now.calls_waiting) == (0, 0)
        assert now.calls_max == ServerConfig().requests_max
        assert now.uptime_seconds > before.uptime_seconds > 0
        own = Client(engine).status()
        assert (own.contexts, own.sessions, own.indexes) == (2, 1, {"flat": 1})
        assert own.calls_max == 0
    until(lambda: client.status().sessions == 0)


def test_a_tenant_sees_its_own(engine, spec, make_kv, tmp_path):
    path, kv = tmp_path / "tokens.json", make_kv(spec, 20)
    tokens = [new_token(path, tenant) for tenant in ("acme", "globex")]
    server = Server(engine, ServerConfig(port=0, tokens_file=str(path), local_socket=""))
    server.start()
    with kvdb.connect(server.target, token=tokens[0]) as acme, kvdb.connect(server.target, token=tokens[1]) as globex:
        acme.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        with acme.create_session(spec, kv.tokens):
            assert (acme.status().contexts, acme.status().sessions) == (1, 1)
            assert (globex.status().contexts, globex.status().sessions) == (0, 0)
    server.stop(grace=0)
