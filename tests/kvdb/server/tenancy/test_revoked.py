"""A token that is taken out of the file ends what was opened with it, within a second or so."""

import json

import numpy as np
import pytest

import kvdb
from kvdb import errors
from kvdb.config import ServerConfig
from kvdb.server.serve import Server
from kvdb.server.tenancy.tokens_file import new_token
from tests.waiting import until


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens.json"


@pytest.fixture(params=["", "auto"], ids=["grpc", "shared memory"])
def server(request, engine, path):
    new_token(path, "first")
    started = Server(engine, ServerConfig(port=0, tokens_file=str(path), local_socket=request.param))
    started.start()
    yield started
    started.stop(grace=0)


def revoke(path, tenant):
    held = json.loads(path.read_text())
    held["tokens"] = [entry for entry in held["tokens"] if entry["tenant"] != tenant]
    path.write_text(json.dumps(held))


def test_what_was_opened_with_it_ends_and_others_go_on(server, path, spec):
    tokens = {tenant: new_token(path, tenant) for tenant in ("acme", "globex")}
    k = np.ones((spec.kv_heads, 1, spec.head_dim), np.float32)
    with (
        kvdb.connect(server.target, token=tokens["acme"]) as acme,
        kvdb.connect(server.target, token=tokens["globex"]) as globex,
    ):
        gone, stays = (db.create_session(spec, [1]) for db in (acme, globex))
        for session in (gone, stays):
            session.update(0, k, k)
        streams, lanes = len(server._streams._open), sum(lane.alive for lane in server._local._lanes)
        assert streams + lanes == 2
        revoke(path, "acme")
        until(lambda: len(server._streams._open) + sum(lane.alive for lane in server._local._lanes) == 1)
        with pytest.raises((errors.Unavailable, errors.Unauthenticated)):  # its stream or region ended
            gone.update(0, k, k)
        with pytest.raises(errors.Unauthenticated):
            gone.update(0, k, k)
        stays.update(0, k, k)
        assert len(server._streams._open) + sum(lane.alive for lane in server._local._lanes) == 1
        stays.close()
