"""A running session that is shared is found by its tokens before it is stored, and nobody notices what becomes of it."""

import numpy as np
import pytest

from kvdb.errors import InvalidArgument
from tests.reference import attention, relative_error

BLOCK = 64


def fill(session, kv, start, stop):
    for layer, (k, v) in enumerate(kv.pairs(start, stop)):
        session.update(layer, k, v)


def check(session, kv, other, at, layer=1):
    """The session holds the text up to `at`, and goes on with another."""
    q, k, v = (x[layer][:, :2] for x in (other.q, other.k, other.v))
    keys, values = (np.concatenate([old[layer][:, :at], new], axis=1) for old, new in ((kv.k, k), (kv.v, v)))
    out = session.attend(layer, q, k, v, start=at)
    assert relative_error(out, attention(q, keys, values, session.spec.softmax_scale, new=2)[0]) < 1e-5


@pytest.mark.parametrize("stored", [0, 100])
def test_others_stand_on_its_full_blocks(db, spec, make_kv, stored):
    kv, other = make_kv(spec, 500), make_kv(spec, 9, seed=3)
    if stored:
        db.import_context(spec, kv.tokens[:stored], kv.pairs(0, stored), name="doc")
    with db.create_session(spec, kv.tokens, share=True) as running:
        fill(running, kv, stored, 400)
        full = stored + (400 - stored) // BLOCK * BLOCK
        first = db.create_session(spec, kv.tokens)
        assert first.reused == first.start == full
        fill(running, kv, 400, 500)
        second = db.create_session(spec, np.append(kv.tokens[:450], 2000))
        assert second.reused == stored + (450 - stored) // BLOCK * BLOCK
        assert db.match(spec, kv.tokens).tokens == stored
        for session in (first, second):
            check(session, kv, other, session.start)
        check(running, kv, other, 500)
        assert db.create_session(spec, kv.tokens[:stored]).reused == stored
    for session in (first, second):
        check(session, kv, other, session.start, layer=0)
    assert db.create_session(spec, kv.tokens).reused == stored
    first.close()
    third = db.create_session(spec, kv.tokens)
    fill(third, kv, stored, 500)
    assert db.store(third, name="whole").tokens == 500
    second.close()
    assert db.match(spec, kv.tokens).tokens == 500


def test_it_may_be_truncated_and_go_on_otherwise(db, spec, make_kv):
    kv, other = make_kv(spec, 300), make_kv(spec, 9, seed=3)
    with db.create_session(spec, kv.tokens, share=True) as running:
        fill(running, kv, 0, 300)
        with db.create_session(spec, kv.tokens) as session:
            assert session.reused == 256
            running.truncate(100)
            check(running, kv, other, 100)
            check(session, kv, other, 256)
            with db.create_session(spec, kv.tokens) as late:
                assert late.reused == 64
                check(late, kv, other, 64)


def test_a_session_on_another_is_stored_with_what_it_stands_on(db, spec, make_kv):
    kv = make_kv(spec, 200)
    with db.create_session(spec, kv.tokens, share=True) as running:
        fill(running, kv, 0, 200)
        with db.create_session(spec, kv.tokens) as session:
            fill(session, kv, session.start, 200)
            db.store(session, name="doc")
        fork = running.fork()
        db.store(running, name="the same")
    assert np.array_equal(db.get("doc").read(1)[0], kv.k[1])
    assert db.get("the same").info.segments == db.get("doc").info.segments
    with db.create_session(spec, kv.tokens) as session:
        assert session.reused == 200
    fork.close()


def test_only_what_was_shared_is_found_and_only_under_its_salt(db, spec, make_kv):
    kv = make_kv(spec, 200)
    with db.create_session(spec, kv.tokens) as alone, db.create_session(spec, kv.tokens, salt="a", share=True) as salted:
        for session in (alone, salted):
            fill(session, kv, 0, 200)
        assert db.create_session(spec, kv.tokens).reused == 0
        assert db.create_session(spec, kv.tokens, salt="a").reused == 192
        with salted.fork() as twin:
            salted.close()
            assert db.create_session(spec, kv.tokens, salt="a").reused == 0
            assert twin.stats().tokens == 200
    with pytest.raises(InvalidArgument):
        db.create_session(spec, parts=[[1]], share=True)
    with pytest.raises(InvalidArgument):
        db.create_session(spec, kv.tokens, share="yes")
