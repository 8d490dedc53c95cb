"""Engines with a GPU: the first card, or Triton's interpreter where there is none."""

import pytest
import torch

import kvdb
from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig, WindowConfig
from kvdb.database import Database
from query_optimizer.cost import GpuMachine
from query_optimizer.query_options import QueryOptions
from tests.kvdb.attention.triton.interpreter import speed_up

speed_up()
DEVICE = "cuda" if torch.cuda.is_available() else "interpreter"
BUDGET = 4 << 20
FAST = GpuMachine(call_s=1e-9, step_s=1e-9, stream_bytes_s=4e10, gather_bytes_s=1e12)
"""So fast that plans take the GPU for contexts of a few hundred tokens too, and search them."""


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    """Room for few more blocks behind a tail: the interpreter runs each program of a launch, also those that find no tokens."""
    for module in ("request", "step_launches"):
        monkeypatch.setattr(f"kvdb.gpu.{module}.TAIL_GROWTH_BLOCKS", 4)


@pytest.fixture
def make_engine():
    """Engines, each of which proves its integrity in the end. budget: of the GPU, 0 for none."""
    made = []

    def make(budget=BUDGET, **storage):
        storage = {"arena_bytes": 1 << 20, "block_size": 16, "gpu_bytes_max": budget, "gpu_device": DEVICE, **storage}
        engine = Database(
            Config(
                storage=StorageConfig(**storage),
                optimizer=OptimizerConfig(short_context_tokens=64),
                window=WindowConfig(16, 32),
                indexes=IndexConfig(on_demand="", segment_tokens_min=64, automatic=False),
            )
        )
        if engine.gpu is not None:
            engine.gpu.machine = FAST
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.check_integrity()
        engine.close()


def spec_of(dtype="float32", head_dim=16, rope=None, layers=1):
    return kvdb.ModelSpec("tiny", layers=layers, q_heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, rope=rope)


def imported(engine, kv, name, n):
    """Store the first n tokens."""
    writing = engine.begin_import(kv.spec, kv.tokens[:n], name)
    for layer, (k, v) in enumerate(kv.pairs(writing.start, n)):
        writing.write(layer, k, v)
    writing.commit()


def settled(engine, session):
    """The session, with everything it stands on copied to the GPU."""
    if engine.gpu is not None:
        session.explain(0)  # a plan asks for the copies
        engine.gpu.mirrors.wait_idle()
    return session


def opened(engine, kv, n):
    """A session over n stored tokens, with everything of it copied to the GPU."""
    return settled(engine, engine.create_session(kv.spec, kv.tokens[:n]))


def step(session, kv, at, options=QueryOptions(), layer=0, n=1):  # noqa: B008  # frozen
    """Tokens [at, at + n) come behind, and ask."""
    k, v = (array[layer][:, at : at + n] for array in (kv.k, kv.v))
    return session.attend(layer, kv.q[layer][:, at : at + n], k, v, options)


def ways(session, options=QueryOptions(), layer=0):  # noqa: B008  # frozen
    """(part, tier, index) of each way of the plan."""
    return {(access.part, access.tier, access.index) for access in session.explain(layer, options).accesses}
