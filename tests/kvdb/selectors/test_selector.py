"""Selectors: what they say of tokens, what they are registered and refused for."""

import inspect
from pathlib import Path

import numpy as np
import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, StorageConfig
from kvdb.errors import ConfigError, InvalidArgument
from kvdb.selectors import registry
from kvdb.selectors.norm import Norm
from kvdb.types import DTYPES
from tests.database import database

SPEC = kvdb.ModelSpec("small", 2, 4, 2, 32, "float32")
GUIDE = Path(__file__).parents[3] / "docs" / "internals" / "extending.md"


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_prefers_short_keys(dtype):
    rng = np.random.default_rng(1)
    lengths = rng.uniform(1, 10, (2, 50))
    directions = rng.standard_normal((2, 50, 32))
    k = (directions / np.linalg.norm(directions, axis=-1, keepdims=True) * lengths[..., None]).astype(DTYPES[dtype])
    scores = Norm().scores(0, k, k[::-1])
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, -lengths, rtol=1e-2)


class Late:
    name = "late"

    def scores(self, layer, k, v):
        return np.broadcast_to(np.arange(k.shape[1], dtype=np.float32), k.shape[:2])


class Broken:
    """Gives one score too few, or one that is none."""

    name = "broken"

    def __init__(self, last):
        self.last = last

    def scores(self, layer, k, v):
        values = np.zeros(k.shape[:2], np.float32)
        values[:, -1] = np.nan
        return values[:, : self.last]


@pytest.fixture
def selectors(monkeypatch):
    """What a test registers is forgotten at its end."""
    monkeypatch.setattr(registry, "SELECTORS", dict(registry.SELECTORS))
    monkeypatch.setattr("kvdb.storage.store.SELECTORS", registry.SELECTORS)


@pytest.mark.parametrize("last", [-1, None])
def test_scores_of_another_shape_or_nan_are_refused_and_nothing_is_stored(selectors, make_kv, last):
    registry.register(Broken(last))
    kv = make_kv(SPEC, 40)
    with database(config=Config(storage=StorageConfig(arena_bytes=1 << 20, selector="broken"))) as engine:
        db = Client(engine)
        with pytest.raises(InvalidArgument, match="the selector 'broken' gave"):
            db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        assert not db.contexts()


def test_a_selector_from_outside_is_asked(selectors, make_kv):
    registry.register(Late())
    kv = make_kv(SPEC, 40)
    with database(config=Config(storage=StorageConfig(arena_bytes=1 << 20, selector="late"))) as engine:
        Client(engine).import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        (view,) = engine._catalog.get("doc").views
        name, values = view.segment.scores.read(None)
        assert name == "late"
        assert (values == np.arange(40)).all()
    assert inspect.getsource(Late) in GUIDE.read_text()


def test_two_selectors_have_two_names(selectors):
    with pytest.raises(ValueError, match="named 'norm' already"):
        registry.register(Norm())


@pytest.mark.parametrize("wrong", [{"selector": "nobody"}, {"selector": "norm", "selector_share": 1.5}])
def test_a_setting_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="storage.selector"):
        StorageConfig(**wrong)
