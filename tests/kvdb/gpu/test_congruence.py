"""The scenarios that run on both transports, on both devices: the same results within the dtype's tolerance, the same errors."""

from dataclasses import replace

import numpy as np
import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config
from kvdb.database import Database
from kvdb.gpu.mirror import Mirrors
from tests.congruence.test_congruence import SCENARIOS, SPEC, STORAGE, Trace
from tests.kvdb.gpu.conftest import BUDGET, DEVICE, FAST
from tests.kvdb.gpu.test_answers import TOLERANCE


class Arrays(Trace):
    """Notes results as they are."""

    def __call__(self, value):
        self.seen.append(value)
        return value


@pytest.fixture
def at_once(monkeypatch):
    """Copies stand before the plan that asks for them goes on; how often there was one."""
    found, prefetch = [], Mirrors.prefetch

    def prefetch_and_wait(self, tier, segment, **named):
        prefetch(self, tier, segment, **named)
        self.wait_idle()
        found.append(self.get(segment) is not None)

    monkeypatch.setattr(Mirrors, "prefetch", prefetch_and_wait)
    return found


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_both_devices_do_the_same(make_kv, at_once, scenario):
    traces = []
    for budget in (0, BUDGET):
        engine = Database(Config(storage=replace(STORAGE, gpu_bytes_max=budget, gpu_device=DEVICE)))
        if engine.gpu is not None:
            engine.gpu.machine = FAST
        trace = Arrays()
        scenario(Client(engine), trace, make_kv(SPEC, 200))
        traces.append(trace.seen)
        engine.check_integrity()
        engine.close()
    assert len(traces[0]) == len(traces[1])
    for here, there in zip(*traces, strict=True):
        alike(there, here)
    assert all(at_once)
    assert at_once or scenario.__name__ in {"importing", "going_wrong", "blending_wrong"}


def alike(there, here):
    """Texts of plans tell of devices, and statistics of what was read there; the rest is the same."""
    assert type(there) is type(here)
    match here:
        case np.ndarray() if here.dtype.kind in "fV":
            np.testing.assert_allclose(np.float32(there), np.float32(here), atol=TOLERANCE[SPEC.dtype], rtol=0)
        case np.ndarray():
            np.testing.assert_array_equal(there, here)
        case kvdb.SessionStats():
            for name in ("tokens", "reused", "tail_tokens", "tail_nbytes", "queries"):
                assert getattr(there, name) == getattr(here, name)
        case kvdb.Context():
            assert replace(there.info, created=0.0, used=0.0) == replace(here.info, created=0.0, used=0.0)
        case float():
            assert there == pytest.approx(here, abs=TOLERANCE[SPEC.dtype])
        case str():
            assert there == here or "Merge on layer" in here
        case list() if here and isinstance(here[0], kvdb.TierStats):
            assert [tier for tier in there if not tier.name.startswith("gpu")] == here
        case list() | tuple():
            assert len(there) == len(here)
            for one, other in zip(there, here, strict=True):
                alike(one, other)
        case _:
            assert there == here
