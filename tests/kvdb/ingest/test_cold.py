"""Quantized segments are laid out anew without being rounded again, and segments that nobody uses go into a smaller format."""

from contextlib import contextmanager

import numpy as np
import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, StorageConfig
from kvdb.errors import ConfigError
from tests.database import database
from tests.reference import attention, relative_error

SPEC = kvdb.ModelSpec("small", 2, 8, 2, 64, "float32", rope=kvdb.Rope(10000.0))
TOKENS, SHARED, BLOCK = 320, 100, 16
FORMATS = ["int8", "int8-int4", "int4"]
COLD = {"format_cold": "int8", "cold_after_seconds": 0.0}


@contextmanager
def opened(path="", **storage):
    settings = StorageConfig(arena_bytes=1 << 20, path=str(path), block_size=BLOCK, **storage)
    with database(config=Config(storage=settings)) as db:
        yield Client(db)


def put(db, kv, name, stop=TOKENS):
    return db.import_context(SPEC, kv.tokens[:stop], kv.pairs(0, stop), name=name)


def same(read, before):
    return all(np.array_equal(x, y) for pair, old in zip(read, before, strict=True) for x, y in zip(pair, old, strict=True))


def flat(pairs):
    return [array for pair in pairs for array in pair]


def blocks(db):
    return sum(tier.blocks_used for tier in db.tiers() if tier.name == "cpu")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("on_disk", [False, True])
def test_what_nobody_needs_of_a_quantized_segment_is_given_back(make_kv, tmp_path, name, on_disk):
    kv, folder = make_kv(SPEC, TOKENS), tmp_path if on_disk else ""
    with opened(folder, format=name) as db:
        put(db, kv, "long")
        short = put(db, kv, "short", SHARED)
        before, info = short.read([0, 1]), short.info
        db.drop("long")
        db.compact()
        assert same(db.get("short").read([0, 1]), before)
        assert blocks(db) == SPEC.layers * -(-SHARED // BLOCK)
        assert db.get("short").info.format == name
        assert db.get("short").info.key_error == info.key_error > 0
        assert db.get("short").info.value_error == info.value_error > 0
    if on_disk:
        with opened(folder) as db:
            assert same(db.get("short").read([0, 1]), before)
            assert db.get("short").info.key_error == info.key_error


def test_many_quantized_turns_become_few_segments_where_they_end_with_blocks(make_kv):
    kv = make_kv(SPEC, TOKENS)
    with opened(format="int8") as db:
        for stop in range(BLOCK, TOKENS + 1, BLOCK):
            put(db, kv, str(stop), stop)
        doc = db.get(str(TOKENS))
        before = doc.read([0, 1])
        assert doc.info.segments < TOKENS // BLOCK
        assert same(doc.read([0, 1]), before)
        assert blocks(db) == SPEC.layers * TOKENS // BLOCK


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_not_used_goes_into_the_cold_format(make_kv, tmp_path, on_disk):
    kv, folder = make_kv(SPEC, TOKENS), tmp_path if on_disk else ""
    with opened(folder) as db:
        raw = put(db, kv, "alone").info.nbytes
    with opened(folder, **COLD) as db:
        if not on_disk:
            put(db, kv, "alone")
        put(db, kv, "short", SHARED)
        db.compact()
        info = db.get("alone").info
        assert (info.format, db.get("short").info.format) == ("int8", "int8")
        assert info.nbytes < 0.4 * raw
        assert 0 < info.key_error < 0.02
        assert 0 < info.value_error < 0.02
        held = db.get("alone").read([0, 1])
        assert all(relative_error(x, y) < 0.02 for x, y in zip(flat(held), flat(kv.pairs()), strict=True))
        with db.create_session(SPEC, kv.tokens[:-1]) as session:
            assert session.reused == TOKENS - 1
            out = session.attend(1, kv.q[1][:, -1:], *(x[:, -1:] for x in kv.pairs()[1]), retrieval=kvdb.Exact())
            expected, _ = attention(kv.q[1][:, -1:], *session.read(1, 0, TOKENS), SPEC.softmax_scale)
            assert relative_error(out, expected) <= 1e-2
    if on_disk:
        with opened(folder) as db:
            assert db.get("alone").info.key_error == info.key_error
            assert same(db.get("alone").read([0, 1]), held)


def test_what_is_used_stays_as_it_came(make_kv):
    kv, other = make_kv(SPEC, TOKENS), make_kv(SPEC, TOKENS, seed=1)
    with opened(**COLD) as db:
        put(db, kv, "open")
        put(db, other, "cold")
        with db.create_session(SPEC, kv.tokens) as session:
            before = session.read(0, 0, TOKENS - 1)
            db.compact()
            assert (db.get("open").info.format, db.get("cold").info.format) == ("", "int8")
            assert same([session.read(0, 0, TOKENS - 1)], [before])
    with opened(format_cold="int8", cold_after_seconds=1000.0) as db:
        put(db, kv, "fresh")
        db.compact()
        assert db.get("fresh").info.format == ""
    with opened() as db:
        put(db, kv, "no format")
        db.compact()
        assert db.get("no format").info.format == ""


def test_a_store_looks_for_what_became_cold_when_others_are_stored(make_kv, tmp_path):
    kv, other = make_kv(SPEC, TOKENS), make_kv(SPEC, TOKENS, seed=1)
    with opened(tmp_path, **COLD) as db:
        put(db, kv, "first")
        put(db, other, "second")
        db._transport._compactor.wait()
        assert db.get("first").info.format == "int8"


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="storage.format_cold is 'int7'"):
        StorageConfig(format_cold="int7")
    with pytest.raises(ConfigError, match="storage.cold_after_seconds is -1"):
        StorageConfig(cold_after_seconds=-1.0)
    with pytest.raises(ConfigError, match="multiple of 16"):
        StorageConfig(format_cold="int8", block_size=8)
