"""Contexts whose segments are quantized: answers, what is read back, what is said of them, and what is refused."""

import numpy as np
import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.codecs.registry import CODECS
from kvdb.config import Config, StorageConfig
from kvdb.errors import ConfigError, InvalidArgument
from tests.database import database
from tests.reference import attention, relative_error

SPEC = kvdb.ModelSpec("small", 2, 8, 2, 64, "float32", rope=kvdb.Rope(10000.0))
FORMATS = ["int8", "int8-int4", "int4"]
ROUNDED = 2e-2
"""The relative error of an answer beside attention over what is stored, where queries and weights have eight bits."""
TOKENS = 300


def quantizing(name, **storage):
    return database(config=Config(storage=StorageConfig(arena_bytes=1 << 20, format=name, **storage)))


def exact(session, layer, q, k, v):
    return session.attend(layer, q, k, v, retrieval=kvdb.Exact())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [1, 6, 40])
def test_answers_are_exact_over_what_is_stored(make_kv, name, n):
    kv = make_kv(SPEC, TOKENS + n)
    with quantizing(name) as engine, Client(engine) as db:
        doc = db.import_context(SPEC, kv.tokens[:TOKENS], kv.pairs(0, TOKENS), name="doc")
        with db.create_session(SPEC, kv.tokens) as session:
            assert session.reused == TOKENS
            new = kv.q[:, :, TOKENS:]
            answers = [exact(session, layer, new[layer], *pair) for layer, pair in enumerate(kv.pairs(TOKENS))]
            for layer, out in enumerate(answers):
                got_k, got_v = session.read(layer)
                assert relative_error(got_k[:, :TOKENS], kv.k[layer][:, :TOKENS]) == pytest.approx(doc.info.key_error, rel=0.2)
                assert np.array_equal(got_k[:, TOKENS:], kv.k[layer][:, TOKENS:])
                expected, _ = attention(new[layer], got_k, got_v, SPEC.softmax_scale, n)
                assert relative_error(out, expected) <= ROUNDED


@pytest.mark.parametrize("name", FORMATS)
def test_a_context_says_how_it_is_stored_and_how_far_off_that_is(make_kv, name):
    kv = make_kv(SPEC, TOKENS)
    with quantizing(name) as engine, Client(engine) as db:
        info = db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc").info
        with database() as plain:
            raw = Client(plain).import_context(SPEC, kv.tokens, kv.pairs(), name="doc").info
        assert info.format == name
        assert 0 < info.key_error <= CODECS[name].key_error_max
        assert 0 < info.value_error <= CODECS[name].value_error_max
        assert info.nbytes < 0.3 * raw.nbytes  # of float32
        assert (raw.format, raw.key_error, raw.value_error) == ("", 0, 0)


def test_a_stored_session_is_quantized_and_goes_on_as_it_was(make_kv):
    kv = make_kv(SPEC, TOKENS + 20)
    with quantizing("int8") as engine, Client(engine) as db:
        with db.create_session(SPEC, kv.tokens[:TOKENS]) as session:
            for layer, pair in enumerate(kv.pairs(0, TOKENS)):
                session.update(layer, *pair)
            doc = db.store(session, name="doc", tokens=kv.tokens[:TOKENS])
            assert np.array_equal(session.read(0)[0], kv.k[0][:, :TOKENS])
            for layer, pair in enumerate(kv.pairs(TOKENS, TOKENS + 20)):
                session.update(layer, *pair)
            longer = db.store(session, name="longer", tokens=kv.tokens)
        assert doc.info.format == longer.info.format == "int8"
        assert relative_error(longer.read(1)[1], kv.v[1]) <= 0.01


def test_sessions_that_are_asked_together_share_quantized_segments(make_kv):
    kv = make_kv(SPEC, 4096)
    with quantizing("int8") as engine, Client(engine) as db:
        db.import_context(SPEC, kv.tokens[:4000], kv.pairs(0, 4000), name="doc")
        sessions = [db.create_session(SPEC, kv.tokens[:4000]) for _ in range(3)]
        new = [np.s_[:, 4000 + i : 4001 + i] for i in range(3)]
        rows = [np.stack([x[0][at] for at in new]) for x in (kv.q, kv.k, kv.v)]
        out = db.attend(sessions, 0, *rows, retrieval=kvdb.Exact())
        for i, session in enumerate(sessions):
            expected, _ = attention(kv.q[0][new[i]], *session.read(0, 0, 4001), SPEC.softmax_scale)
            assert relative_error(out[i], expected) <= ROUNDED
            session.close()


def test_offloaded_segments_come_back_as_they_were(make_kv, tmp_path):
    kv = make_kv(SPEC, TOKENS)
    with quantizing("int8-int4", disk_path=str(tmp_path)) as engine, Client(engine) as db:
        doc = db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        before = doc.read([0, 1])
        db.offload("doc")
        for (k, v), (old_k, old_v) in zip(doc.read([0, 1]), before, strict=True):
            assert np.array_equal(k, old_k)
            assert np.array_equal(v, old_v)


def test_quantized_chunks_may_stand_anywhere(make_kv):
    kv = make_kv(SPEC, TOKENS)
    with quantizing("int8") as engine, Client(engine) as db:
        db.import_chunk(SPEC, kv.tokens, kv.pairs(), name="chunk")
        with db.create_session(SPEC, parts=[[1, 2, 3], "chunk"]) as session:
            rows = np.arange(3)
            for layer in range(SPEC.layers):
                session.overlay(layer, rows, kv.k[layer][:, :3], kv.v[layer][:, :3])
            k, v = session.read(0)
            at = np.array([1, 2, 150, TOKENS + 2])
            q = kv.q[0][:, : len(at)]
            out = session.attention(0, q, positions=at)
            for i, position in enumerate(at):
                seen = np.s_[:, : position + 1]
                expected, _ = attention(q[:, i : i + 1], k[seen], v[seen], SPEC.softmax_scale)
                assert relative_error(out[:, i : i + 1], expected) <= ROUNDED


def test_numbers_that_cannot_be_rotated_are_refused(make_kv):
    kv = make_kv(SPEC, 20)
    kv.k[0, 0, :, :] = 3e38
    with quantizing("int8") as engine, Client(engine) as db:
        with pytest.raises(InvalidArgument, match="too large for the format"):
            db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        assert not db.contexts()


def test_each_call_may_name_a_format(db, make_kv):
    kv = make_kv(SPEC, TOKENS)
    alone = make_kv(SPEC, 80, seed=1)
    db.import_context(SPEC, kv.tokens[:100], kv.pairs(0, 100), name="short", format="int8")
    with db.create_session(SPEC, kv.tokens[:100]) as session:
        for layer, pair in enumerate(kv.pairs(100)):
            session.update(layer, *pair)
        long = db.store(session, name="long", tokens=kv.tokens, format="int4")
    chunk = db.import_chunk(SPEC, alone.tokens, alone.pairs(), name="chunk", format="int8-int4")
    assert [info.format for info in (long.info, chunk.info)] == ["int8+int4", "int8-int4"]
    k, v = long.read(1)
    assert relative_error(v[:, :100], kv.v[1][:, :100]) <= 0.01 < relative_error(v[:, 100:], kv.v[1][:, 100:]) <= 0.13
    with db.create_session(SPEC, kv.tokens) as session:
        out = session.attention(1, kv.q[1][:, -1:], retrieval=kvdb.Exact())
        assert relative_error(out, attention(kv.q[1][:, -1:], k, v, SPEC.softmax_scale)[0]) <= ROUNDED
    with pytest.raises(InvalidArgument, match="format"):
        db.import_context(SPEC, alone.tokens, alone.pairs(), name="other", format="int3")


def test_a_call_may_ask_for_what_the_setting_does_not(make_kv):
    kv = make_kv(SPEC, 50)
    with quantizing("int4") as engine:
        assert Client(engine).import_context(SPEC, kv.tokens, kv.pairs(), name="doc", format="").info.format == ""
    odd = database(config=Config(storage=StorageConfig(block_size=40)))
    with odd as engine, pytest.raises(InvalidArgument, match="multiple of 16"):
        Client(engine).import_context(SPEC, kv.tokens, kv.pairs(), name="doc", format="int8")


def test_an_import_holds_one_layer_at_most_as_it_came(make_kv):
    spec = kvdb.ModelSpec("deep", 6, 8, 2, 64, "float32")
    kv = make_kv(spec, TOKENS)
    raw_layer = 2 * 2 * 320 * 64 * 4
    with quantizing("int8") as engine, Client(engine) as db:
        used = []

        def layers():
            for pair in kv.pairs():
                used.append(sum(tier.blocks_used * tier.block_nbytes for tier in db.tiers()))
                yield pair

        doc = db.import_context(spec, kv.tokens, layers(), name="doc")
        assert max(used) < doc.info.nbytes < raw_layer * 2


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match="multiple of 16"):
        StorageConfig(format="int8", block_size=40)
    with pytest.raises(ConfigError, match=r"storage\.format"):
        StorageConfig(format="int3")
