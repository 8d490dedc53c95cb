"""Tenants of one server: each has its own contexts and sessions, and cannot tell another's from none."""

import json
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

import numpy as np
import pytest

import kvdb
from kvdb import errors
from kvdb.config import Config, MetricsConfig, ServerConfig
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.server.http.opening import open_http
from kvdb.server.serve import Server
from kvdb.server.tenancy.tokens_file import new_token

TENANTS = ("acme", "globex")
TRANSPORTS = ("", "auto")


class World:
    """A server with two tenants and an admin."""

    def __init__(self, engine, path, local_socket):
        self.tokens = {tenant: new_token(path, tenant, admin=tenant == "ops") for tenant in (*TENANTS, "ops")}
        self.config = ServerConfig(port=0, tokens_file=str(path), token="operator", local_socket=local_socket)
        self.server = Server(engine, self.config)
        self.server.start()
        self.tokens["operator"] = "operator"

    @contextmanager
    def clients(self, *names):
        opened = [kvdb.connect(self.server.target, token=self.tokens[name]) for name in names]
        yield opened
        for one in opened:
            one.close()


@pytest.fixture(params=TRANSPORTS, ids=["grpc", "shared memory"])
def world(request, engine, tmp_path):
    made = World(engine, tmp_path / "tokens.json", request.param)
    yield made
    made.server.stop(grace=0)


def error_of(call):
    """The class and text of what a call raises."""
    try:
        call()
    except errors.KvdbError as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


def test_each_has_its_own_context_of_the_same_name_and_tokens(world, spec, make_kv):
    kv, other = make_kv(spec, 130, seed=1), make_kv(spec, 130, seed=2)
    with world.clients(*TENANTS) as (acme, globex):
        assert acme.import_context(spec, kv.tokens, kv.pairs(), name="doc").name == "doc"
        assert globex.match(spec, kv.tokens).tokens == 0
        globex.import_context(spec, kv.tokens, other.pairs(), name="doc")
        for db, own in ((acme, kv), (globex, other)):
            assert [context.name for context in db.contexts()] == ["doc"]
            assert db.match(spec, kv.tokens).tokens == 130
            np.testing.assert_array_equal(db.get("doc").read(0)[0], own.pairs()[0][0])
            with db.create_session(spec, kv.tokens) as session:
                assert session.reused == 130
                assert session.store(name="copy").name == "copy"
        acme.rename("doc", "report")
        assert {context.name for context in acme.contexts()} == {"copy", "report"}
        assert {context.name for context in globex.contexts()} == {"copy", "doc"}
        acme.drop("report", "copy")
        assert not acme.contexts()
        assert len(globex.contexts()) == 2


def test_not_yours_and_not_there_are_told_alike(world, spec, make_kv):
    kv = make_kv(spec, 40)
    with world.clients(*TENANTS) as (acme, globex):
        acme.import_context(spec, kv.tokens, kv.pairs(), name="theirs")
        for call in (
            globex.get,
            globex.drop,
            globex.pin,
            globex.indexes,
            globex.statistics,
            globex.explain,
            globex.offload,
            lambda name: globex.rename(name, "mine"),
            lambda name: globex.create_session(spec, parts=[kvdb.PromptPart(name)]),
        ):
            for name in ("theirs", "acme/theirs", "../acme/theirs"):
                kind, said = error_of(lambda call=call, name=name: call(name))
                absent = name.replace("theirs", "absent")
                assert "acme" not in said.replace(name, "")
                assert (kind, said.replace(name, absent)) == error_of(lambda call=call, absent=absent: call(absent))
                assert issubclass(kind, errors.NotFound)
        assert acme.get("theirs").tokens == 40


def test_a_session_is_its_tenants_alone(world, spec):
    with world.clients(*TENANTS) as (acme, globex):
        session = acme.create_session(spec, [1, 2, 3], label="chat")
        stolen, absent = (pb.StatsRequest(session_id=name) for name in (session._transport.id, "absent"))
        connection = globex._transport._connection
        told = error_of(lambda: connection.call(stolen))
        assert told == error_of(lambda: connection.call(absent))
        assert told[0] is errors.SessionClosed
        assert session.stats().tokens == 0
        session.close()


def test_an_admin_and_the_operator_see_all(world, spec, make_kv):
    kv = make_kv(spec, 40)
    with world.clients("acme", "ops", "operator") as (acme, *admins):
        acme.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        for admin in admins:
            assert [context.name for context in admin.contexts()] == ["acme/doc"]
            assert admin.verify_store() == []
            assert admin.space().held > 0


def test_what_concerns_all_is_an_admins(world, spec, make_kv):
    kv = make_kv(spec, 40)
    with world.clients(*TENANTS) as (acme, globex):
        acme.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        assert globex.space().held == sum(tier.nbytes for tier in globex.tiers()) == 0
        assert acme.space().held == sum(tier.nbytes for tier in acme.tiers()) > 0
        for call in (globex.verify_store, globex.compact, lambda: globex.backup("/tmp/nowhere")):
            assert error_of(call)[0] is errors.PermissionDenied


def test_the_console_and_metrics_show_what_one_may_see(world, spec, make_kv):
    kv = make_kv(spec, 40)
    config = Config(server=world.config, metrics=MetricsConfig(port=0))
    http = open_http(config, lambda: True, world.server.pages(), world.server.credentials)
    http.start()
    address = urlsplit(http.url)

    def ask(path, token):
        connection = HTTPConnection(address.hostname, address.port, timeout=5)
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        reply = connection.getresponse()
        body = reply.read()
        connection.close()
        return reply.status, body

    with world.clients("acme") as (acme,):
        acme.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        session = acme.create_session(spec, [1])
        seen = {name: json.loads(ask("/ui/api/overview", token)[1]) for name, token in world.tokens.items()}
        counts = {name: (told["contexts"], told["sessions"]) for name, told in seen.items()}
        assert counts == {"acme": (1, 1), "globex": (0, 0), "ops": (1, 1), "operator": (1, 1)}
        assert {name: ask("/metrics", token)[0] for name, token in world.tokens.items()} == {
            "acme": 401,
            "globex": 401,
            "ops": 200,
            "operator": 200,
        }
        assert ask("/ui/api/overview", "wrong")[0] == 401
        session.close()
    http.stop()


def test_a_token_that_is_nobodys_comes_no_further(world):
    with pytest.raises(errors.Unauthenticated):
        kvdb.connect(world.server.target, token="nobody")
    with pytest.raises(errors.Unauthenticated):
        kvdb.connect(world.server.target)


def test_events_say_whose_call_it_was(world, engine, spec, make_kv):
    kv, told = make_kv(spec, 40), []
    engine.events.add(told.append)
    with world.clients("acme") as (acme,):
        acme.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    assert {event.origin.tenant for event in told if event.kind == "context_stored"} == {"acme"}
