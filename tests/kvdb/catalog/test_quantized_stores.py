"""Quantized segments on the disk: they come back as they were, and are checked, copied and read out like others."""

import sqlite3
from contextlib import closing, contextmanager

import numpy as np
import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.errors import IntegrityError
from kvdb.server.serve import Server
from tests.database import database
from tests.reference import attention, relative_error

SPEC = kvdb.ModelSpec("small", 2, 8, 2, 64, "float32", rope=kvdb.Rope(10000.0))
FORMATS = ["int8", "int8-int4", "int4"]
TOKENS = 300


@contextmanager
def opened(path, **storage):
    with database(config=Config(storage=StorageConfig(arena_bytes=1 << 20, path=str(path), **storage))) as db:
        yield Client(db)


def same(read, before):
    return all(np.array_equal(x, y) for pair, old in zip(read, before, strict=True) for x, y in zip(pair, old, strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_a_context_comes_back_after_a_restart_whatever_the_setting_is_then(make_kv, tmp_path, name):
    kv = make_kv(SPEC, TOKENS + 1)
    with opened(tmp_path, format=name) as db:
        doc = db.import_context(SPEC, kv.tokens[:TOKENS], kv.pairs(0, TOKENS), name="doc")
        before, info = doc.read([0, 1]), doc.info
    with opened(tmp_path) as db:
        doc = db.get("doc")
        assert (doc.info.format, doc.info.key_error, doc.info.value_error) == (name, info.key_error, info.value_error)
        assert doc.info.nbytes == info.nbytes
        assert same(doc.read([0, 1]), before)
        with db.create_session(SPEC, kv.tokens) as session:
            new = kv.pairs(TOKENS)[0]
            out = session.attend(0, kv.q[0][:, TOKENS:], *new, retrieval=kvdb.Exact())
            expected, _ = attention(kv.q[0][:, TOKENS:], *session.read(0, 0, TOKENS + 1), SPEC.softmax_scale)
            assert relative_error(out, expected) <= 2e-2


def test_one_context_may_lie_in_segments_of_several_formats(make_kv, tmp_path):
    kv = make_kv(SPEC, TOKENS)
    ends = {"int8": 100, "": 180, "int4": TOKENS}
    for name, end in ends.items():
        with opened(tmp_path, format=name) as db:
            db.import_context(SPEC, kv.tokens[:end], kv.pairs(0, end), name=name or "raw")
    with opened(tmp_path) as db:
        doc = db.get("int4")
        assert doc.info.format == "int8+raw+int4"
        with db.create_session(SPEC, kv.tokens[:-1]) as session:
            out = session.attend(1, kv.q[1][:, -1:], *(x[:, -1:] for x in kv.pairs()[1]), retrieval=kvdb.Exact())
            expected, _ = attention(kv.q[1][:, -1:], *session.read(1, 0, TOKENS), SPEC.softmax_scale)
            assert relative_error(out, expected) <= 2e-2
        k, v = doc.read(1)
        assert np.array_equal(k[:, 100:180], kv.k[1][:, 100:180])
        assert relative_error(v[:, :100], kv.v[1][:, :100]) <= 0.01
        db.compact()
        assert same(doc.read([1]), [(k, v)])


@pytest.mark.needs_folder
def test_changed_bits_are_found(make_kv, tmp_path):
    kv = make_kv(SPEC, TOKENS)
    with opened(tmp_path, format="int8") as db:
        doc = db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        assert db.verify("doc").blocks == 2 * 5
        db.offload("doc")
        (path,) = tmp_path.glob("segments/*.segment")
        with path.open("r+b") as file:
            file.seek(-5000, 2)
            byte = file.read(1)
            file.seek(-5000, 2)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(IntegrityError, match="checksum"):
            doc.read([0, 1])


def test_a_row_of_an_unknown_format_is_damage(make_kv, tmp_path):
    kv = make_kv(SPEC, 20)
    with opened(tmp_path, format="int8") as db:
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as catalog:
        catalog.execute("UPDATE segment SET format = 'int4'")
        catalog.commit()
    with opened(tmp_path) as db, pytest.raises(IntegrityError):
        db.get("doc")


def test_a_backup_holds_them_as_they_are(make_kv, tmp_path):
    kv = make_kv(SPEC, TOKENS)
    with opened(tmp_path / "store", format="int8-int4") as db:
        before = db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc").read([0, 1])
        assert db.backup(str(tmp_path / "copy")).contexts == 1
    with opened(tmp_path / "copy") as db:
        assert same(db.get("doc").read([0, 1]), before)


def test_one_that_does_not_fit_into_memory_is_read_layer_by_layer(make_kv, tmp_path):
    spec = kvdb.ModelSpec("deep", 8, 8, 2, 64, "float32")
    kv = make_kv(spec, 1024)
    with opened(tmp_path, format="int8") as db:
        doc = db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        before, nbytes = doc.read(range(8)), doc.info.nbytes
    with opened(tmp_path, cpu_bytes_max=nbytes // 2) as db, db.create_session(spec, kv.tokens) as session:
        for layer in range(8):
            assert same([session.read(layer)], [before[layer]])
            out = session.attention(layer, kv.q[layer][:, -1:], retrieval=kvdb.Exact())
            expected, _ = attention(kv.q[layer][:, -1:], *before[layer], spec.softmax_scale)
            assert relative_error(out, expected) <= 2e-2


def test_explain_says_how_each_part_is_quantized_and_what_that_changed(make_kv, tmp_path):
    kv = make_kv(SPEC, TOKENS)
    ends = {"int8": 100, "": 180, "int8-int4": TOKENS - 1}
    with opened(tmp_path) as db:
        docs = [
            db.import_context(SPEC, kv.tokens[:end], kv.pairs(0, end), name=name or "raw", format=name)
            for name, end in ends.items()
        ]
        with db.create_session(SPEC, kv.tokens) as session:
            session.attend(1, kv.q[1][:, -1:], *(x[:, -1:] for x in kv.pairs()[1]))
            for plan in (session.explain(1), session.explain(1, analyze=True)):
                eight, raw, four, tail = plan.accesses
                assert [access.format for access in plan.accesses] == ["int8", "", "int8-int4", ""]
                assert (eight.key_error, eight.value_error) == (docs[0].info.key_error, docs[0].info.value_error)
                assert 0 < eight.key_error < 0.02 < four.value_error < 0.2
                assert (raw.key_error, raw.value_error, tail.key_error, tail.value_error) == (0, 0, 0, 0)
                told = f"changed keys by {eight.key_error:.2%} and values by {eight.value_error:.2%}"
                assert f"Format: int8, which {told}" in str(plan)
                assert str(plan).count("Format: ") == 2
                assert kvdb.Plan.from_dict(plan.to_dict()) == plan


def test_a_client_of_a_server_is_told_the_same_of_each_part(make_kv):
    kv = make_kv(SPEC, TOKENS)
    with database() as engine:
        server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
        server.start()
        try:
            with kvdb.connect(server.target) as db:
                info = db.import_context(SPEC, kv.tokens[:-1], kv.pairs(0, TOKENS - 1), name="doc", format="int8").info
                with db.create_session(SPEC, kv.tokens) as session:
                    session.attend(1, kv.q[1][:, -1:], *(x[:, -1:] for x in kv.pairs()[1]))
                    for plan in (session.explain(1), session.explain(1, analyze=True)):
                        stored, _ = plan.accesses
                        assert stored.format == "int8"
                        assert (stored.key_error, stored.value_error) == (info.key_error, info.value_error)
        finally:
            server.stop(grace=0)
