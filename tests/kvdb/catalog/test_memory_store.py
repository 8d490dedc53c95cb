"""A whole database on a store that is no folder: everything above it knows nothing of files."""

from contextlib import contextmanager

import numpy as np
import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import IntegrityError, Unavailable
from tests.conftest import Kv
from tests.kvdb.catalog.offloading import SPEC
from tests.memory_stores import KeptStore, in_memory

TOKENS = 2048
BUDGET = 3 * TOKENS * SPEC.token_nbytes // 2
"""For one layer of four, and the session's own tokens."""


@pytest.fixture(autouse=True)
def memory():
    with in_memory():
        yield


@contextmanager
def opened(**storage):
    config = Config(storage=StorageConfig(arena_bytes=1 << 20, **storage), indexes=IndexConfig(automatic=False, on_demand=""))
    with Database(config) as engine:
        yield engine, Client(engine)
        engine.check_integrity()


def segments(engine):
    return engine._blocks.disk.store


def test_a_store_is_opened_again_and_read_page_by_page(tmp_path, monkeypatch):
    kv = Kv(SPEC, TOKENS, seed=5)
    with opened(path=str(tmp_path / "store")) as (engine, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        db.import_context(SPEC, kv.tokens[::-1].copy(), kv.pairs(), name="other")
        db.build_index("doc", "flat")
        session = db.create_session(SPEC, kv.tokens)
        right = [session.attention(layer, kv.q[layer][:, :4], retrieval=kvdb.TopK(8)) for layer in range(SPEC.layers)]
        assert isinstance(segments(engine), KeptStore)
        assert not list((tmp_path / "store" / "segments").iterdir())
        db.drop("other")
        kept = segments(engine).list()
    assert sorted(kept) == ["0.flat.0.index", "0.flat.1.index", "0.flat.2.index", "0.flat.3.index", "0.segment"]
    with opened(path=str(tmp_path / "store"), cpu_bytes_max=BUDGET) as (engine, db):
        assert engine.verify("doc").nbytes == sum(kept.values())
        session = db.create_session(SPEC, kv.tokens)
        assert session.reused == TOKENS
        for layer, expected in enumerate(right):
            found = session.attention(layer, kv.q[layer][:, :4], retrieval=kvdb.TopK(8))
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        session.close()
        store = segments(engine)
        content = bytearray(store.objects["0.segment"])
        content[-5000] ^= 1
        good, store.objects["0.segment"] = store.objects["0.segment"], content
        with pytest.raises(IntegrityError, match="layer 3 does not match its checksum"):
            db.verify("doc")
        with db.create_session(SPEC, kv.tokens) as session:
            session.attention(0, kv.q[0][:, :1], retrieval=kvdb.Exact())  # and layer 1 is read ahead: the others go
            with pytest.raises(IntegrityError, match="layer 3 does not match its checksum"):
                session.attention(3, kv.q[3][:, :1], retrieval=kvdb.Exact())
        store.objects["0.segment"] = good
        with monkeypatch.context() as patch, db.create_session(SPEC, kv.tokens) as session:
            session.attention(0, kv.q[0][:, :1], retrieval=kvdb.Exact())
            patch.setattr(store, "open", unavailable)
            for retrieval in (kvdb.Exact(), kvdb.TopK(8)):
                with pytest.raises(Unavailable, match="^the store does not answer; try again$"):
                    session.attention(3, kv.q[3][:, :1], retrieval=retrieval)
        db.drop("doc")
        assert store.list() == {}


def unavailable(key, *, whole_pages):
    raise Unavailable("the store does not answer; try again")


def test_what_is_offloaded_goes_there_and_a_store_that_fails_is_told(tmp_path, monkeypatch):
    kv = Kv(SPEC, 600, seed=6)
    with opened(disk_path=str(tmp_path)) as (engine, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        assert db.offload("doc")
        assert list(segments(engine).list()) == ["0.segment"]
        with monkeypatch.context() as patch:
            patch.setattr(segments(engine), "open", unavailable)
            session = db.create_session(SPEC, kv.tokens)
            with pytest.raises(Unavailable, match="does not answer"):
                session.attention(0, kv.q[0][:, :1], retrieval=kvdb.Exact())
            session.close()
        k, v = db.get("doc").read(0)
        np.testing.assert_array_equal((k, v), (kv.k[0], kv.v[0]))
