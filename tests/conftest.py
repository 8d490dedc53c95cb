"""Fixtures that every test shares."""

import os
import threading

# Before anything imports Triton: without a card, its kernels run under its interpreter.
if not os.path.exists("/proc/driver/nvidia/version"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest

import kvdb
import kvdb.machine as machine
from kvdb.config import OWN_CACHE, Config, ServerConfig, StorageConfig
from kvdb.types import DTYPES
from query_optimizer.cost import Machine


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory):
    """Not the user's; with a machine in it, so that servers need not measure one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        machine.write(machine.path_of(OWN_CACHE), Machine())
        yield


@pytest.fixture
def spec():
    """A small model, GQA 4:2."""
    return kvdb.ModelSpec("tiny", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")


@pytest.fixture
def rng():
    return np.random.default_rng(7)


class Kv:
    """Random keys, values and queries of a spec for n tokens; `kv[layer]` is (k, v)."""

    def __init__(self, spec, n, seed=0):
        rng = np.random.default_rng(seed)
        dtype = DTYPES[spec.dtype]
        self.spec = spec
        self.tokens = rng.integers(0, 1000, n).astype(np.int32)
        self.k = rng.standard_normal((spec.layers, spec.kv_heads, n, spec.head_dim)).astype(dtype)
        self.v = rng.standard_normal((spec.layers, spec.kv_heads, n, spec.head_dim)).astype(dtype)
        self.q = rng.standard_normal((spec.layers, spec.q_heads, n, spec.head_dim)).astype(dtype)

    def pairs(self, start=0, end=None):
        """One (k, v) a layer of tokens [start, end)."""
        return [(k[:, start:end], v[:, start:end]) for k, v in zip(self.k, self.v, strict=True)]


@pytest.fixture
def make_kv():
    return Kv


@pytest.fixture
def engine():
    """An embedded database whose blocks must all have come back, each with its owner, at the end of the test."""
    from kvdb.database import Database

    database = Database(Config(storage=StorageConfig(arena_bytes=1 << 20)))
    yield database
    database.check_integrity()
    database.close()


@pytest.fixture(params=["embedded", "remote"])
def db(request, engine):
    """The public client, embedded and through gRPC; both over an engine that proves its integrity afterwards."""
    from kvdb.client.client import Client

    if request.param == "embedded":
        yield Client(engine)
        return
    from kvdb.server.serve import Server

    server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
    server.start()
    try:
        with kvdb.connect(server.target) as client:
            yield client
    finally:
        server.stop(grace=0)
    assert not [t for t in threading.enumerate() if t.name.startswith("kvdb-server")], "the server left threads behind"
