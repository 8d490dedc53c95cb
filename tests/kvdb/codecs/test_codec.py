"""Codecs: a new one is a class with a name and what it writes; from there on it is imported, stored and attended by its name."""

import inspect
from pathlib import Path

import numpy as np
import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.codecs import registry
from kvdb.codecs.changed import Changed
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.errors import ConfigError, InvalidArgument
from kvdb.server.serve import Server
from kvdb.storage.block_layout import BlockLayout
from tests.database import database
from tests.reference import attention, relative_error

SPEC = kvdb.ModelSpec("small", 2, 8, 2, 64, "float32", rope=kvdb.Rope(10000.0))
TOKENS = 300


GUIDE = Path(__file__).parents[3] / "docs" / "internals" / "extending.md"


class Coarse(Changed):
    name = "coarse"
    key_error_max = value_error_max = 0.04

    def change(self, k, v):
        return eighths(k), eighths(v)


def eighths(rows):
    return np.round(rows * 8) / 8


@pytest.fixture
def coarse(monkeypatch):
    """The codec, for the time of a test."""
    monkeypatch.setattr(registry, "CODECS", dict(registry.CODECS))
    registry.register(Coarse())


def opened(path, **storage):
    return database(config=Config(storage=StorageConfig(arena_bytes=1 << 20, path=str(path), **storage)))


def check(db, kv):
    """The document holds eighths, says so, and is attended as it is stored."""
    doc = db.get("doc")
    assert doc.info.format == "coarse"
    assert 0 < doc.info.key_error <= Coarse.key_error_max
    assert doc.info.key_error == pytest.approx(relative_error(eighths(kv.k[:, :, :TOKENS]), kv.k[:, :, :TOKENS]), rel=1e-5)
    for layer, (k, v) in enumerate(kv.pairs(0, TOKENS)):
        assert np.array_equal(doc.read(layer)[0], eighths(k))
        assert np.array_equal(doc.read(layer)[1], eighths(v))
    q, old, new = kv.q[:, :, TOKENS:], kv.pairs(0, TOKENS), kv.pairs(TOKENS)
    with db.create_session(SPEC, kv.tokens) as session:
        for layer in range(SPEC.layers):
            out = session.attend(layer, q[layer], *new[layer], retrieval=kvdb.Exact())
            held = [np.concatenate([eighths(first), own], axis=1) for first, own in zip(old[layer], new[layer], strict=True)]
            assert relative_error(out, attention(q[layer], *held, SPEC.softmax_scale)[0]) < 1e-5


def test_a_codec_in_python_is_imported_stored_and_attended(coarse, make_kv, tmp_path):
    kv = make_kv(SPEC, TOKENS + 1)
    with opened(tmp_path, format="coarse") as engine, Client(engine) as db:
        db.import_context(SPEC, kv.tokens[:TOKENS], kv.pairs(0, TOKENS), name="doc")
        check(db, kv)
    with opened(tmp_path) as engine, Client(engine) as db:
        check(db, kv)
        db.compact()
        check(db, kv)


def test_a_codec_in_python_is_asked_for_over_the_wire(coarse, make_kv):
    kv = make_kv(SPEC, TOKENS + 1)
    with database() as engine:
        server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
        server.start()
        try:
            with kvdb.connect(server.target) as db:
                db.import_context(SPEC, kv.tokens[:TOKENS], kv.pairs(0, TOKENS), name="doc", format="coarse")
                check(db, kv)
        finally:
            server.stop(grace=0)


def test_a_codec_that_nobody_registered_is_refused_by_its_name(make_kv):
    kv = make_kv(SPEC, TOKENS)
    with pytest.raises(ConfigError, match="'coarse'; expected one of '', 'int8', 'int8-int4', 'int4'"):
        StorageConfig(format="coarse")
    with database() as engine, pytest.raises(InvalidArgument, match="'coarse'; expected one of '', 'int8'"):
        Client(engine).import_context(SPEC, kv.tokens, kv.pairs(), name="doc", format="coarse")


def test_two_codecs_have_two_names(coarse):
    with pytest.raises(ValueError, match="named 'coarse' already"):
        registry.register(Coarse())


def test_names_and_numbers_that_stand_in_stores_stay():
    assert {name: codec.number for name, codec in registry.CODECS.items()} == {"": 0, "int8": 1, "int8-int4": 2, "int4": 3}
    assert [registry.of_number(number).name for number in range(4)] == list(registry.CODECS)


@pytest.mark.parametrize(("name", "bits"), [("", (32, 32)), ("int8", (8, 8)), ("int8-int4", (8, 4)), ("int4", (4, 4))])
def test_a_block_has_the_bytes_of_its_codes_and_little_more(name, bits):
    layout = BlockLayout.of(SPEC.shape(0), 64).in_format(name)
    codes = layout.kv_heads * layout.block_size * layout.head_dim * sum(bits) // 8
    assert codes <= layout.nbytes <= codes * 1.2
    assert layout.value_nbytes * layout.block_size / layout.nbytes == pytest.approx(bits[1] / sum(bits), rel=0.1)


def test_the_guide_shows_the_codec_that_is_tested():
    assert f"{inspect.getsource(Coarse)}\n\n{inspect.getsource(eighths)}" in GUIDE.read_text()
