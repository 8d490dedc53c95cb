"""What every test shares: how much is tried, how many threads, and the fixtures."""

import gc
import os
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

# Before anything is imported: the tests start dozens of processes, each of which would compile every library anew where the
# environment wants no byte code in its folders.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / "build" / "pycache")

# Before anything imports numpy or torch: workers of pytest-xdist share the cores, so each library stays on one of them.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

# Before anything imports Triton: without a card, its kernels run under its interpreter.
if not os.path.exists("/proc/driver/nvidia/version"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import kvdb
import kvdb.hardware.profile as profile
from kvdb.config import OWN_CACHE, ServerConfig
from kvdb.types import DTYPES
from query_optimizer.cost import Machine

# The one place that says how many examples a property is tried with; `make test-long` takes the long profile.
settings.register_profile(
    "quick",
    max_examples=20,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("long", parent=settings.get_profile("quick"), max_examples=500)
settings.load_profile("quick")


def pytest_collection_finish():
    """What was imported for the tests stays to the end, so no collection of garbage needs to look through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory):
    """A cache folder of the tests' own. It holds numbers of this machine, so that no server measures it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        profile.write(profile.path_of(OWN_CACHE), Machine())
        yield


@pytest.fixture(autouse=True, scope="session")
def memory_stores():
    """Where the environment asks for it, segments lie in memory and in no folder; see `tests.memory_stores`."""
    import tests.memory_stores as memory_stores

    with memory_stores.in_memory() if memory_stores.ASKED else nullcontext():
        yield


def pytest_collection_modifyitems(items):
    if os.environ.get("KVDB_TEST_STORE") == "memory":
        for item in items:
            if item.get_closest_marker("needs_folder"):
                item.add_marker(pytest.mark.skip(reason="segments lie in memory"))


@pytest.fixture(autouse=True, scope="session")
def integrity_watch():
    """Every database that the tests open."""
    from tests.integrity import watched

    with watched() as watch:
        yield watch
    assert not watch.take_errors()


@pytest.fixture(autouse=True)
def integrity(integrity_watch):
    """No test leaves blocks without an owner, or owners without a block, in any database that it opened."""
    yield
    errors = integrity_watch.take_errors()
    assert not errors, f"integrity is broken: {errors[0]}"


@pytest.fixture
def spec():
    """The spec of a small model: two layers, four query heads on two KV heads."""
    return kvdb.ModelSpec("tiny", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")


@pytest.fixture
def rng():
    return np.random.default_rng(7)


class Kv:
    """Random tokens with keys, values and queries of a spec, n tokens long: k, v `[layers, kv_heads, n, head_dim]`,
    q `[layers, q_heads, n, head_dim]`."""

    def __init__(self, spec, n, seed=0):
        rng = np.random.default_rng(seed)
        dtype = DTYPES[spec.dtype]
        self.spec = spec
        self.tokens = rng.integers(0, 1000, n).astype(np.int32)
        self.k = rng.standard_normal((spec.layers, spec.kv_heads, n, spec.head_dim)).astype(dtype)
        self.v = rng.standard_normal((spec.layers, spec.kv_heads, n, spec.head_dim)).astype(dtype)
        self.q = rng.standard_normal((spec.layers, spec.q_heads, n, spec.head_dim)).astype(dtype)

    def pairs(self, start=0, end=None):
        """The keys and values of tokens [start, end), as `import_context` takes them: one (k, v) a layer."""
        return [(k[:, start:end], v[:, start:end]) for k, v in zip(self.k, self.v, strict=True)]


@pytest.fixture
def make_kv():
    """`make_kv(spec, n, seed=0)` makes a `Kv`."""
    return Kv


@pytest.fixture
def engine():
    """An embedded database that proves its integrity at the end of the test."""
    from tests.database import database

    with database() as opened:
        yield opened


@pytest.fixture
def witness():
    """A rule that keeps the options of every query, for a database to ask."""
    from tests.kvdb.witness import Witness

    return Witness()


@pytest.fixture
def scan_for_flat(monkeypatch):
    """The kind flat is a plain scan that never gives up, so that what is read is what is asked for."""
    import indexes.registry as registry
    from tests.scan import Scan

    monkeypatch.setattr(registry, "KINDS", {**registry.KINDS, "flat": Scan})


@pytest.fixture(scope="module")
def one_thread():
    """torch on one thread: matrices of a few rows are slower on two."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["embedded", "remote"])
def db(request, engine):
    """The public client of `engine`, once embedded and once through gRPC."""
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
