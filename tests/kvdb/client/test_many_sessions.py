"""Many sessions in one call: the same as one after the other, and what fails for one does nothing to the others."""

import numpy as np
import pytest

import kvdb
from kvdb import errors
from kvdb.errors import InvalidArgument

COUNT = 3
TOKENS = 20


@pytest.fixture
def kvs(spec, make_kv):
    return [make_kv(spec, TOKENS, seed) for seed in range(COUNT)]


def stacked(kvs, layer, n):
    """k and v of the first n tokens of a layer, one for each session."""
    return tuple(np.stack([getattr(kv, name)[layer][:, :n] for kv in kvs]) for name in "kv")


def test_all_know_how_many_tokens_they_are_for(db, engine, spec):
    sessions = db.create_sessions(spec, [[1], [2]], expected_tokens=20)
    opened = engine.handles.open()
    assert [session.terms.expected_tokens for session in opened] == [20, 20]
    db.close_sessions(sessions)
    with pytest.raises(InvalidArgument, match="expected_tokens"):
        db.create_sessions(spec, [[1]], expected_tokens=-1)


def test_they_are_what_single_calls_make(db, spec, kvs):
    kept = [kv.tokens for kv in kvs]
    db.import_context(spec, kept[1], kvs[1].pairs(), name="doc")
    sessions = db.create_sessions(spec, kept)
    alone = [db.create_session(spec, tokens) for tokens in kept]
    assert [session.reused for session in sessions] == [session.reused for session in alone]
    assert sessions[1].reused > 0
    for layer in range(spec.layers):
        k, v = stacked(kvs, layer, 5)
        starts = [session.start for session in sessions]
        assert db.update_sessions(sessions, layer, k, v, starts=starts) == [None] * COUNT
        for i, session in enumerate(alone):
            session.update(layer, k[i], v[i])
    left = [session.start + 2 for session in sessions]
    assert db.truncate_sessions(sessions, left) == [None] * COUNT
    for session, other, kv, tokens in zip(sessions, alone, kvs, left, strict=True):
        other.truncate(tokens)
        assert session.stats().tokens == other.stats().tokens == tokens
        np.testing.assert_array_equal(session.tokens, other.tokens)
        q = kv.q[0][:, :2]
        np.testing.assert_array_equal(session.attention(0, q), other.attention(0, q))
    db.close_sessions(sessions)
    for session in sessions:
        with pytest.raises(errors.SessionClosed):
            session.stats()
        session.close()
    db.close_sessions(alone[:1])
    db.close_sessions([])


def test_what_fails_for_one_leaves_the_others(db, spec, kvs):
    sessions = db.create_sessions(spec, [[1], [2], [3]])
    sessions[2].update(0, kvs[2].k[0][:, :1], kvs[2].v[0][:, :1])
    k, v = stacked(kvs, 0, 1)
    k[1, 0, 0, 0] = np.nan
    done = db.update_sessions(sessions, 0, k, v, starts=[0, 0, 0])
    assert [type(error) for error in done] == [type(None), errors.NonFiniteError, errors.PositionError]
    kept = db.truncate_sessions(sessions, [0, 9, 0])
    assert [type(error) for error in kept] == [type(None), errors.PositionError, type(None)]
    for session in sessions:
        session.attend(0, kvs[0].q[0][:, :1], *(array[0][:, :1] for array in (kvs[0].k, kvs[0].v)), start=0)
    db.close_sessions(sessions)


def test_all_are_created_or_none(db, spec, engine):
    before = engine.count_sessions()
    with pytest.raises(errors.InvalidArgument):
        db.create_sessions(spec, [[1], [2], [-1]])
    assert engine.count_sessions() == before


def test_calls_that_cannot_be(db, spec, kvs):
    sessions = db.create_sessions(spec, [[1], [2]])
    k, v = stacked(kvs[:2], 0, 1)
    for call in (
        lambda: db.update_sessions([*sessions, sessions[0]], 0, k, v),
        lambda: db.update_sessions(sessions, 0, k[:1], v),
        lambda: db.update_sessions(sessions, 0, k, v, starts=[0]),
        lambda: db.truncate_sessions(sessions, [0]),
        lambda: db.close_sessions([sessions[0], "session"]),
    ):
        with pytest.raises(errors.InvalidArgument):
            call()
    with kvdb.connect() as other, pytest.raises(errors.InvalidArgument, match="another database"):
        other.close_sessions(sessions)
    db.close_sessions(sessions)


def test_none_is_created_of_none(db, spec):
    assert db.create_sessions(spec, []) == []
