"""KV that is read back is what attention sees: what was handed in, at the positions where it stands."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, StorageConfig
from kvdb.errors import DtypeError, InvalidArgument, LayerError, NotFound, PositionError, SessionClosed, ShapeError
from kvdb.types import DTYPES
from tests.database import database
from tests.kvdb.blend.oracle import ROPES, TOLERANCE, Oracle, Text, make_texts
from tests.reference import relative_error


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_imported_and_appended_comes_back_to_the_bit(db, make_kv, dtype):
    spec = kvdb.ModelSpec("m", 3, 4, 2, 24, dtype)
    kv = make_kv(spec, 300)
    db.import_context(spec, kv.tokens[:100], kv.pairs(0, 100), name="short")
    doc = db.import_context(spec, kv.tokens[:200], kv.pairs(0, 200), name="doc")
    for start, stop in ((0, 200), (0, 0), (63, 65), (99, 101), (7, 199), (200, 200)):
        for layer, pair in enumerate(doc.read(range(3), start, stop)):
            assert_pair(pair, kv, layer, start, stop)
    with db.create_session(spec, kv.tokens[:170]) as session:
        for layer in (2, 0, 1):
            session.update(layer, *kv.pairs(170, 290)[layer])
        session.update(1, *kv.pairs(290, 300)[1])
        for start, stop in ((0, None), (99, 171), (169, 170), (170, 290), (250, 251)):
            assert_pair(session.read(2, start, stop), kv, 2, start, 290 if stop is None else stop)
        assert_pair(session.read(1, 280, 300), kv, 1, 280, 300)
        first, second = session.read([1, 0], 100, 250)
        assert_pair(first, kv, 1, 100, 250)
        assert_pair(second, kv, 0, 100, 250)


def assert_pair(pair, kv, layer, start, stop):
    for got, expected in zip(pair, (kv.k, kv.v), strict=True):
        assert got.dtype == expected.dtype
        assert np.array_equal(got, expected[layer][:, start:stop])


def test_it_is_written_where_the_caller_says(db, make_kv):
    spec = kvdb.ModelSpec("m", 2, 4, 2, 24, "bfloat16")
    kv = make_kv(spec, 90)
    doc = db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    cache = torch.zeros(
        2, 2, 2, 128, 24, dtype=torch.bfloat16
    )  # an engine's own: [layers, k or v, kv_heads, positions, head_dim]
    out = [(cache[layer, 0, :, 20:100], cache[layer, 1, :, 20:100]) for layer in range(2)]
    assert doc.read([0, 1], 5, 85, out=out) is out
    expected = np.stack([kv.k, kv.v], axis=1)[:, :, :, 5:85]
    assert (cache[:, :, :, 20:100].view(torch.int16).numpy() == expected.view(np.int16)).all()
    assert not cache[:, :, :, :20].any()
    assert not cache[:, :, :, 100:].any()
    by_token = np.zeros((2, 80, 2, 24), kv.k.dtype)  # [k or v, positions, kv_heads, head_dim]
    doc.read(1, 5, 85, out=by_token.transpose(0, 2, 1, 3))
    assert np.array_equal(by_token.transpose(0, 2, 1, 3), expected[1])


def test_what_cannot_be_read(db, spec, make_kv):
    kv = make_kv(spec, 90)
    doc = db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    session = db.create_session(spec, kv.tokens)
    for source in (doc, session):
        for layers in (2, -1, [0, 2], ["0"], [None]):
            with pytest.raises(LayerError):
                source.read(layers)
        for start, stop in ((0, 91), (91, None), (4, 3), (-1, 3), (0.5, 3), (0, "3"), (0, 1 << 70)):
            with pytest.raises(PositionError):
                source.read(0, start, stop)
        k, v = source.read(0)
        frozen = k.copy()
        frozen.flags.writeable = False
        for out in (3, k, (k,), (frozen, v), (k[::-1].transpose(0, 2, 1).copy().transpose(0, 2, 1), v)):
            with pytest.raises((InvalidArgument, ShapeError)):
                source.read(0, out=out)
        with pytest.raises(InvalidArgument):
            source.read([0, 1], out=[(k, v)])
        with pytest.raises(ShapeError):
            source.read(0, 1, out=(k, v))
        with pytest.raises(DtypeError):
            source.read(0, out=(k.astype(np.float16), v.astype(np.float16)))
        with pytest.raises(InvalidArgument):
            source.read(None)
        assert source.read([]) == []
    session.close()
    with pytest.raises(SessionClosed):
        session.read(0)
    doc.drop()
    with pytest.raises(NotFound):
        doc.read(0)


@given(st.sampled_from(sorted(ROPES)), st.data())
def test_moved_chunks_and_recomputed_tokens_are_where_attention_sees_them(spec, rope, data):
    spec = replace(spec, rope=ROPES[rope])
    texts = make_texts(spec)
    with database() as engine, Client(engine) as db:
        for name in ("a", "b"):
            texts[name].store(db, name)
        parts, oracle = (
            [[1, 2, 3], "a", [9], "b", "a"],
            Oracle(spec, [3, (texts["a"], 130), 1, (texts["b"], 70), (texts["a"], 130)]),
        )
        with db.create_session(spec, parts=parts) as session:
            rows = np.array([0, 1, 2, 30, 133, 134, 200, session.start - 1])
            fresh, new = Text(spec, len(rows), 31), Text(spec, 70, 32)
            with pytest.raises(PositionError, match="hold nothing yet"):
                session.read(0)
            for layer in range(spec.layers):
                session.overlay(layer, rows, fresh.k[layer], fresh.v[layer])
                oracle.overlay(layer, rows, fresh.k[layer], fresh.v[layer])
                session.update(layer, new.k[layer], new.v[layer])
                oracle.append(layer, new.k[layer], new.v[layer])
            blended = db.store(session, name="blended", tokens=[*session.tokens, *range(70)])
            start, stop = sorted(data.draw(st.tuples(*[st.integers(0, session.start + 70)] * 2)))
            for layer in range(spec.layers):
                k, v = session.read(layer, start, stop)
                if start < stop:
                    assert relative_error(k, oracle.keys[layer][:, start:stop]) <= TOLERANCE[spec.dtype]
                    assert relative_error(v, oracle.values[layer][:, start:stop]) <= TOLERANCE[spec.dtype]
                assert np.array_equal(blended.read(layer, start, stop), (k, v))


def test_what_lies_on_disk_is_brought_back_as_far_as_it_is_read(tmp_path, spec, make_kv):
    kv = make_kv(spec, 400)
    with (
        database(config=Config(storage=StorageConfig(arena_bytes=1 << 20, disk_path=str(tmp_path)))) as engine,
        Client(engine) as db,
    ):
        db.import_context(spec, kv.tokens[:256], kv.pairs(0, 256), name="first")
        doc = db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        db.offload("doc")
        assert_pair(doc.read(1, 10, 150), kv, 1, 10, 150)
        assert db.match(spec, kv.tokens).resident == 256
        for layer, pair in enumerate(doc.read([0, 1])):
            assert_pair(pair, kv, layer, 0, 400)
