"""A session that was truncated is one that never held what was cut: the same answers, whatever it stands on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdb
from kvdb.errors import InvalidArgument, PositionError, SessionClosed
from tests.database import database, small_config
from tests.kvdb.blend.oracle import ROPES, Text, make_texts
from tests.reference import relative_error

STORED, N, STEP = 200, 420, 30
EXACT = kvdb.QueryOptions(kvdb.Exact())
SEARCHED = kvdb.QueryOptions(kvdb.Dipr(1e-9), hints=kvdb.Hints("flat", rules_off=("diffuse_head",)))
"""A range that holds every token, so that an index finds what exact attention reads."""


def fill(session, kv, start, stop, layers=None):
    """Append tokens [start, stop) of the text to these layers, in steps, and ask about the last of each, so that older ones are
    indexed."""
    for at in range(start, stop, STEP):
        for layer in range(session.spec.layers) if layers is None else layers:
            now = slice(at, min(at + STEP, stop))
            session.update(layer, kv.k[layer][:, now], kv.v[layer][:, now], start=at)
            searched(session, layer, kv.q[layer][:, now][:, -1:])


def searched(session, layer, q):
    """The answer of an index, where any part is long enough for one."""
    try:
        return session.attention(layer, q, options=SEARCHED)
    except InvalidArgument:
        return session.attention(layer, q, options=EXACT)


def assert_same_answers(session, fresh, kv, at):
    """Both answer the next tokens alike, one at a time and several, exactly and searched."""
    for n in (1, 1, 3):
        for layer in range(session.spec.layers):
            now = slice(at, at + n)
            arrays = [x[layer][:, now] for x in (kv.q, kv.k, kv.v)]
            for one in (session, fresh):
                one.update(layer, *arrays[1:], start=at)
            q = arrays[0][:, -1:]
            expected = fresh.attention(layer, q, options=EXACT)
            for out in (session.attention(layer, q, options=EXACT), searched(session, layer, q)):
                assert relative_error(out, expected) < 1e-5
        at += n


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, N - 20), st.integers(0, N - 20)), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_truncate_and_append_again_is_never_to_have_appended(db_searched, make_kv, cuts, forked, stored):
    """Into the stored prefix, into the tail with and without sealed tokens, and with blocks that forks and contexts share."""
    db, spec, kv = db_searched
    other, draft = make_kv(spec, N, seed=5), make_kv(spec, N, seed=6)
    with db.create_session(spec, kv.tokens[:STORED]) as session:
        text = replace_after(kv, kv, 0)
        length, held = STORED, []
        for number, (grown, cut) in enumerate(cuts):
            fill(session, draft, length, max(grown, length))
            if forked:
                held.append(session.fork())
            if stored:
                ids = np.random.default_rng(number).integers(0, 1000, max(grown, length)).astype(np.int32)
                ids[: len(session.tokens)] = session.tokens
                db.store(session, name=f"doc {number}", tokens=ids) if len(ids) else None
            text = replace_after(text, draft, length)
            length = min(cut, max(grown, length))
            session.truncate(length)
            assert session.stats().tokens == length
            assert session.start == min(session.start, length) == session.reused
        text = replace_after(text, other, length)
        with db.create_session(spec, []) as fresh:
            fill(fresh, text, 0, length)
            fill(session, text, length, length + 7)
            fill(fresh, text, length, length + 7)
            assert_same_answers(session, fresh, text, length + 7)
        for twin in held:
            twin.close()
    for number in range(len(cuts)):
        if stored and any(context.name == f"doc {number}" for context in db.contexts()):
            db.drop(f"doc {number}")


def replace_after(kv, other, length):
    """The text `kv` up to token `length`, and then another."""
    text = Joined()
    for name in ("q", "k", "v"):
        setattr(text, name, np.concatenate([getattr(kv, name)[:, :, :length], getattr(other, name)[:, :, length:]], axis=2))
    return text


class Joined:
    """Keys, values and queries, `[layers, heads, n, head_dim]`."""


@pytest.fixture(scope="module")
def db_searched():
    """A database whose tails are indexed early, and a stored text."""
    from tests.conftest import Kv

    spec = kvdb.ModelSpec("tiny", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")
    kv = Kv(spec, N)
    config = small_config(tail_tokens=32)
    with database(config=config) as engine, kvdb.client.client.Client(engine) as db:
        db.import_context(spec, kv.tokens[:STORED], kv.pairs(0, STORED), name="doc")
        db.build_index("doc", "flat")
        yield db, spec, kv
        assert db.get("doc").tokens == STORED
        engine.check_integrity()


def test_layers_in_the_middle_of_a_step_are_brought_back_to_one_length(db, spec, make_kv):
    kv = make_kv(spec, 90)
    with db.create_session(spec, []) as session, db.create_session(spec, []) as fresh:
        fill(session, kv, 0, 70)
        fill(session, kv, 70, 75, layers=[0])
        session.truncate(72)
        with pytest.raises(PositionError, match="layers of different lengths|hold 70 to 72 tokens"):
            session.store("x", kv.tokens[:72])
        session.truncate(70)
        session.truncate(70)
        fill(fresh, kv, 0, 70)
        for layer in range(spec.layers):
            assert (session.attention(layer, kv.q[layer][:, 69:70]) == fresh.attention(layer, kv.q[layer][:, 69:70])).all()
        with pytest.raises(PositionError, match="tokens is 71; expected at most 70"):
            session.truncate(71)
    with pytest.raises(SessionClosed):
        session.truncate(0)


def test_a_truncated_session_no_longer_knows_the_ids_behind(db, spec, make_kv):
    kv = make_kv(spec, 130)
    db.import_context(spec, kv.tokens[:100], kv.pairs(0, 100), name="doc")
    with db.create_session(spec, kv.tokens) as session:
        session.truncate(64)
        assert (session.start, session.reused, session.stats().tokens) == (64, 64, 64)
        assert [(part.begin, part.end) for part in session.layout] == [(0, 64)]
        assert (session.tokens == kv.tokens[:64]).all()
        fill(session, kv, 64, 80)
        others = np.append(kv.tokens[:64], np.arange(2000, 2016)).astype(np.int32)
        session.store("other", others)
        session.truncate(0)
        assert (session.layout, session.start) == ((), 0)
    assert db.match(spec, others).tokens == 80
    assert db.match(spec, kv.tokens).tokens == 100


@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize("tokens", [0, 1, 5, 70, 134, 140, 141, 160, 204, 214])
def test_what_was_laid_out_of_parts_is_cut_with_its_overlay(engine, spec, rope, tokens):
    """Gaps, moved chunks and recomputed tokens before the cut stay, and a fork keeps everything."""
    spec = replace(spec, rope=ROPES[rope])
    texts, db = make_texts(spec), kvdb.client.client.Client(engine)
    for name in ("a", "b"):
        texts[name].store(db, name)
    parts = [[1, 2, 3, 4], "a", [5, 6], "b", [7, 8]]
    fresh, new = Text(spec, 12, 50), Text(spec, 20, 60)
    rows = [np.array([203, 20, 0, 150, 1, 2]), np.array([3, 134, 135, 60, 61, 140])]
    with db.create_session(spec, parts=parts) as session:
        start = session.start
        for layer in range(spec.layers):
            for number, given in enumerate(rows):
                at = np.sort(given)
                k, v = (x[layer][:, 6 * number : 6 * number + 6] for x in (fresh.k, fresh.v))
                session.overlay(layer, at, k, v)
            session.update(layer, *(x[layer][:, :10] for x in (new.k, new.v)))
        whole = [session.read(layer) for layer in range(spec.layers)]
        with session.fork() as twin:
            session.truncate(tokens)
            assert (session.start, session.stats().tokens) == (min(start, tokens), tokens)
            assert session.reused <= session.start
            for layer, (k, v) in enumerate(whole):
                kept = session.read(layer)
                assert np.array_equal(kept, (k[:, :tokens], v[:, :tokens]))
                q, more = new.q[layer][:, 10:13], [x[layer][:, 10:13] for x in (new.k, new.v)]
                out = session.attend(layer, q, *more, start=tokens)
                with db.create_session(spec, []) as plain:
                    plain.update(layer, k[:, :tokens], v[:, :tokens])
                    assert relative_error(out, plain.attend(layer, q, *more)) < 1e-5
                assert (twin.read(layer)[0] == k).all()
