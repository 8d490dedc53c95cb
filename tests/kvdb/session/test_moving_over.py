"""Open sessions go over to other segments of the same tokens when space is laid out anew, and no answer changes."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

import kvdb
from kvdb.ingest import compactor
from kvdb.ingest.rebuilt import rebuilt
from tests.racing import race
from tests.reference import attention, relative_error
from tests.stores import SPEC, compacted, config, connect, kv_of, put

BLOCK = 8
TURNS = np.arange(200) % 64


@pytest.fixture(params=["memory", "store"])
def db(request, tmp_path):
    opened = kvdb.connect(config=config(block_size=BLOCK)) if request.param == "memory" else connect(tmp_path, block_size=BLOCK)
    with opened:
        yield opened
        opened._transport.check_integrity()


def used(db):
    return sum(stats.blocks_used for stats in db.tiers() if stats.name == "cpu")


def least(tokens):
    return SPEC.layers * -(-tokens // BLOCK)


def decode(session, tokens, steps):
    """Append and ask `steps` tokens behind `tokens`, each of which is answered by the keys and values of all. Returns all of
    them."""
    q = np.random.default_rng(3).standard_normal((SPEC.q_heads, 1, SPEC.head_dim)).astype(np.float32)
    for token in range(steps):
        tokens = np.r_[tokens, token]
        for layer, (k, v) in enumerate(kv_of(tokens)):
            got = session.attend(layer, q, k[:, -1:], v[:, -1:])
            assert relative_error(got, attention(q, k, v, SPEC.softmax_scale)[0]) < 1e-5
    return tokens


def test_a_session_keeps_only_what_it_sees(db):
    put(db, TURNS, "long")
    with db.create_session(SPEC, TURNS[:40]) as session:
        assert session.reused == 40
        tokens = decode(session, TURNS[:40], 3)
        db.drop("long")
        compacted(db)
        assert used(db) <= 1.1 * least(40) + SPEC.layers
        decode(session, tokens, 5)
    assert not used(compacted(db))


def test_forks_share_what_they_went_over_to(db):
    put(db, TURNS, "long")
    with db.create_session(SPEC, TURNS[:80]) as session, session.fork() as fork, db.create_session(SPEC, TURNS[:40]) as shorter:
        db.drop("long")
        compacted(db)
        assert used(db) <= 1.1 * least(80)
        for one, tokens in ((session, 80), (fork, 80), (shorter, 40)):
            decode(one, TURNS[:tokens], 3)


def test_a_session_over_many_turns_goes_over_to_one_segment(db):
    for end in range(10, 201, 10):
        put(db, TURNS[:end], f"turn {end}")
    with db.create_session(SPEC, TURNS) as session:
        for end in range(10, 201, 10):
            db.drop(f"turn {end}")
        compacted(db)
        assert used(db) <= 1.1 * least(200)
        decode(session, TURNS, 3)


def test_a_session_in_a_call_goes_over_when_the_next_one_begins(db):
    put(db, TURNS, "long")
    with db.create_session(SPEC, TURNS[:40]) as session, ThreadPoolExecutor(1) as other:
        tokens = decode(session, TURNS[:40], 3)
        with session._transport.turns:  # as a call does
            other.submit(db.drop, "long").result()
            other.submit(db.compact).result()
            assert used(db) >= least(200)
            db._transport.check_integrity()
        tokens = decode(session, tokens, 1)
        compacted(db)
        assert used(db) <= 1.1 * least(40) + SPEC.layers
        decode(session, tokens, 3)


def test_what_a_closed_session_was_to_go_over_to_is_freed(db):
    put(db, TURNS, "long")
    session = db.create_session(SPEC, TURNS[:40])
    with ThreadPoolExecutor(1) as other, session._transport.turns:
        other.submit(db.drop, "long").result()
        other.submit(db.compact).result()
    session.close()
    assert not used(compacted(db))


def test_nobody_waits_while_blocks_are_copied_and_files_written(db, monkeypatch):
    """Sessions are opened, decode and are stored, and contexts come and go, before the compaction has gone on."""
    inside, go_on, build = Event(), Event(), rebuilt

    def held_up(*parts):
        inside.set()
        assert go_on.wait(20)
        return build(*parts)

    put(db, TURNS, "long")
    put(db, TURNS[:40], "short")
    compacted(db)
    monkeypatch.setattr(compactor, "rebuilt", held_up)
    with db.create_session(SPEC, TURNS[:40]) as session, ThreadPoolExecutor(1) as other:
        db._transport._compactor.stop()  # until `compact`
        db.drop("long")
        db._transport._compactor._stopped = False
        working = other.submit(db.compact)
        try:
            assert inside.wait(20)
            tokens = decode(session, TURNS[:40], 3)
            with db.create_session(SPEC, TURNS[:40]) as another:
                decode(another, TURNS[:40], 3)
            db.store(session, name="more", tokens=tokens)
            put(db, np.r_[TURNS[:20], 60], "other")
            db.drop("other")
            assert not working.done()
        finally:
            go_on.set()
        working.result()
        decode(session, tokens, 3)
        compacted(db)
        assert used(db) <= 1.1 * least(46) + SPEC.layers


def test_sessions_decode_while_what_they_stand_on_is_laid_out_anew(db):
    """One thread decodes, another stores and drops what is seen of the same segments."""
    put(db, TURNS[:64], "kept")
    session, at = db.create_session(SPEC, TURNS[:64]), {"tokens": TURNS[:64], "made": 0}

    def step():
        at["tokens"] = decode(session, at["tokens"], 1)
        if len(at["tokens"]) > 100:
            session.truncate(30)
            at["tokens"] = at["tokens"][:30]

    def come_and_go():
        name = str(at["made"])
        at["made"] += 1
        put(db, np.r_[TURNS[: 20 + at["made"] % 30], 50 + np.arange(9)], name)
        db.drop(name)
        if at["made"] == 1:
            db.drop("kept")

    race(step, come_and_go, seconds=0.4)
    session.close()
    assert not used(compacted(db))
