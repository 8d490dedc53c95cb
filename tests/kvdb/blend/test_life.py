"""What becomes of chunks, overlays and blended contexts: shared, stored, dropped, given back."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

import kvdb
from kvdb import errors
from tests.kvdb.blend.decoding import decode
from tests.kvdb.blend.oracle import Oracle, Text
from tests.reference import relative_error

PARTS = [[4000, 4001], "b", "a", "b"]
GAPS = [0, 1]
START = 272


@pytest.fixture
def blocks_used(engine):
    """`blocks_used()` counts the blocks that hold anything."""
    return lambda: sum(tier.blocks_used for tier in engine.tiers())


@pytest.fixture
def stored(db, texts):
    """Chunks by name, as the oracle takes them."""
    for name, text in texts.items():
        text.store(db, name)
    return {name: (text, text.n) for name, text in texts.items()}


def lay_out(db, spec, stored, parts=PARTS):
    """A session and what it holds; gaps are lists of ids."""
    oracle = Oracle(spec, [len(part) if isinstance(part, list) else stored[part] for part in parts])
    return db.create_session(spec, parts=parts), oracle


def overlay(session, oracle, positions, seed):
    fresh = Text(session.spec, len(positions), seed)
    for layer, (k, v) in enumerate(fresh.pairs):
        session.overlay(layer, positions, k, v)
        oracle.overlay(layer, positions, k, v)


def check(session, oracle, seed=60):
    """Attention of the last token, and of tokens before the tail, in every layer."""
    positions = np.array([0, 1, 2, 71, 72, 201, 202, START - 1])
    fresh = Text(session.spec, len(positions), seed)
    for layer in range(session.spec.layers):
        out = session.attention(layer, fresh.q[layer], positions=positions)
        assert relative_error(out, oracle.attention(layer, fresh.q[layer], positions)) <= 1e-5
        if oracle.length(layer) > oracle.start:
            q = fresh.q[layer][:, :1]
            assert relative_error(session.attention(layer, q), oracle.attention(layer, q)) <= 1e-5


def test_forks_go_their_own_ways(db, spec, stored):
    """Copy on write, of the overlay as of the tail, however deep."""
    session, oracle = lay_out(db, spec, stored)
    overlay(session, oracle, [*GAPS, 50], seed=1)
    decode(session, oracle, steps=(3,))
    family = [(session, oracle)]
    for seed in range(4):
        parent, known = family[seed // 2]
        family.append((parent.fork(), known.copy()))
        assert family[-1][0].layout == session.layout
        for number, one in enumerate(family):
            if (number + seed) % 2:
                overlay(*one, [100 + seed, 150 + number * 10 + seed], seed=10 * seed + number)
                decode(*one, steps=(1 + number,), seed=seed + number)
        for one in family:
            check(*one)
    for one in family[::2]:
        one[0].close()
    for one in family[1::2]:
        check(*one)
        one[0].close()


def test_a_fork_outlives_a_refused_overlay_of_its_twin(db, spec, stored):
    """A refused overlay may have copied the shared block already; the twin's is reused by others."""
    session, oracle = lay_out(db, spec, stored)
    overlay(session, oracle, [*GAPS, 50], seed=1)
    twin = session.fork()
    bad = np.full((2, 1, 16), np.nan, np.float32)
    for layer in range(2):
        with pytest.raises(errors.NonFiniteError):
            session.overlay(layer, [60], bad, bad)
    twin.close()
    other, known = lay_out(db, spec, stored, [*PARTS, "a"])
    overlay(other, known, list(range(300)), seed=4)
    check(session, oracle)
    decode(session, oracle)
    session.close()
    other.close()


@pytest.mark.parametrize("tail", [0, 5, 64])
def test_a_blended_session_is_stored_and_reused_as_a_prefix(db, spec, stored, tail):
    session, oracle = lay_out(db, spec, stored)
    overlay(session, oracle, [*GAPS, 70, 71, 200], seed=1)
    ids = session.tokens
    if tail:
        decode(session, oracle, steps=(tail,))
        ids = np.concatenate([ids, np.arange(9000, 9000 + tail)]).astype(np.int32)
    info = db.store(session, name="blended", tokens=ids).info
    assert (info.tokens, info.chunk, info.blended) == (START + tail, False, True)
    decode(session, oracle, steps=(2, 7))  # the session goes on, and what is stored stays as it was
    overlay(session, oracle, [5, 90], seed=2)
    session.close()

    oracle = Oracle(spec, [2, stored["b"], stored["a"], stored["b"]])
    fresh = Text(spec, 5, seed=1)
    for layer, (k, v) in enumerate(fresh.pairs):
        oracle.overlay(layer, [*GAPS, 70, 71, 200], k, v)
        oracle.append(layer, *(x[layer][:, :tail] for x in (Text(spec, tail, seed=77).k, Text(spec, tail, seed=77).v)))
    reused = {"alone": ["blended"], "with more": ["blended", "c", [4002], "a"]}
    for parts in reused.values():
        known = oracle.copy()
        for part in parts[1:]:
            more = Oracle(spec, [START + tail if known.start == START else known.length(0)])
            begin = known.length(0)
            more = Oracle(spec, [begin, stored[part] if isinstance(part, str) else len(part)])
            for layer in range(2):
                known.append(layer, more.keys[layer][:, begin:], more.values[layer][:, begin:])
        known.start = known.length(0)
        with db.create_session(spec, parts=parts) as again:
            gaps = [START + tail + 64] if len(parts) > 1 else []
            assert (again.start, again.reused) == (known.start, known.start - len(gaps))
            assert again.layout[0] == kvdb.Placed(0, START + tail, "prefix")
            assert again.tokens[: START + tail].tolist() == ids.tolist()
            if gaps:
                overlay(again, known, [*gaps, gaps[0] + 9], seed=3)
            check(again, known)
            decode(again, known)
            overlay(again, known, [6], seed=4)  # not of the stored one: what is stored stays as it is
            check(again, known)
    with db.create_session(spec, ids) as fresh:
        assert fresh.reused == 0  # never found by its tokens


def test_a_blended_context_stands_at_the_beginning_alone(db, spec, stored):
    session, oracle = lay_out(db, spec, stored)
    overlay(session, oracle, GAPS, seed=1)
    db.store(session, name="blended")
    session.close()
    with pytest.raises(errors.InvalidArgument, match="stands at the beginning only"):
        db.create_session(spec, parts=["a", "blended"])
    with pytest.raises(errors.InvalidArgument, match="expected all of it"):
        db.create_session(spec, parts=[kvdb.PromptPart("blended", visible=3)])


def test_a_session_that_was_decoded_from_nothing_becomes_a_chunk(db, spec, stored):
    text = Text(spec, 90, seed=20)
    with db.create_session(spec, []) as session:
        for layer, (k, v) in enumerate(text.pairs):
            session.update(layer, k, v)
        info = db.store(session, name="new", tokens=text.tokens, chunk=True).info
        assert (info.chunk, info.blended) == (True, False)
    session, oracle = lay_out(db, spec, {**stored, "new": (text, 90)}, ["a", "new", "b", "new"])
    decode(session, oracle)
    session.close()


def test_what_stands_behind_a_prefix_becomes_a_chunk(db, spec, stored):
    """Its keys are of the positions at which they were computed; it may stand anywhere, and is found by its own tokens alone."""
    text, known = Text(spec, 90, seed=20, base=130), stored["a"][0].tokens
    with db.create_session(spec, known) as session:
        assert session.start == 130
        for layer, (k, v) in enumerate(text.pairs):
            session.update(layer, k, v)
        info = db.store(session, name="new", tokens=[*known, *text.tokens], chunk=True).info
    assert (info.chunk, info.blended, info.tokens) == (True, False, 90)
    assert db.name_chunk(spec, text.tokens, name="again") is not None
    with db.create_session(spec, text.tokens) as session:
        assert session.start == 0
    session, oracle = lay_out(db, spec, {**stored, "new": (text, 90)}, ["new", "b", "new"])
    assert [part.kind for part in session.layout] == ["chunk"] * 3
    decode(session, oracle)
    session.close()


def test_sessions_that_hold_no_chunk(db, spec, stored):
    with db.create_session(spec, parts=["b"]) as session, pytest.raises(errors.InvalidArgument, match="laid out of parts"):
        db.store(session, name="x", chunk=True)
    with (
        db.create_session(spec, stored["a"][0].tokens) as session,
        pytest.raises(errors.InvalidArgument, match="nothing behind the 130 tokens"),
    ):
        db.store(session, name="x", chunk=True)
    assert len(db.contexts()) == len(stored)


def test_a_chunk_that_is_dropped_stays_until_the_session_closes(db, spec, stored, blocks_used, engine):
    session, oracle = lay_out(db, spec, stored)
    overlay(session, oracle, [*GAPS, 99], seed=1)
    before = blocks_used()
    for name in stored:
        db.drop(name)
    engine.check_integrity()
    assert 0 < blocks_used() < before  # "c" and "d" are gone, which nobody uses
    for context in ("a", "b"):
        with pytest.raises(errors.NotFound):
            db.create_session(spec, parts=[context])
    check(session, oracle)
    twin = session.fork()
    decode(session, oracle, steps=(1, 40))
    session.close()
    assert blocks_used() > 0
    twin.close()
    assert blocks_used() == 0
    engine.check_integrity()


def test_a_blended_context_outlives_its_chunks(db, spec, stored, blocks_used):
    session, oracle = lay_out(db, spec, stored)
    overlay(session, oracle, [*GAPS, 99], seed=1)
    db.store(session, name="blended")
    session.close()
    for name in stored:
        db.drop(name)
    with db.create_session(spec, parts=["blended"]) as again:
        db.drop("blended")
        check(again, oracle)
        decode(again, oracle)
    assert blocks_used() == 0


def test_the_same_text_is_stored_once(db, spec, texts, blocks_used):
    """Under every name and from whatever base; the last name that is dropped frees it."""
    text = texts["a"]
    first = text.store(db, "one").info
    used = blocks_used()
    for base, name in ((0, "two"), (1000, "three"), (7, "four")):
        again = Text(spec, text.n, seed=0, base=base)
        assert again.store(db, name).info.nbytes == first.nbytes
        assert blocks_used() == used
    assert db.name_chunk(spec, text.tokens, name="five") is not None
    assert db.name_chunk(spec, text.tokens[:-1], name="six") is None
    with db.create_session(spec, parts=["three", "one"]) as session:
        decode(session, Oracle(spec, [(text, text.n), (text, text.n)]))
    for name in ("one", "two", "three", "four"):
        db.drop(name)
        assert blocks_used() == used
    db.drop("five")
    assert blocks_used() == 0
    text.store(db, "one")  # and again from the beginning
    assert blocks_used() == used


def test_a_refused_chunk_leaves_nothing(db, spec, texts, blocks_used):
    text = texts["a"]
    bad = [(k, np.where(np.arange(130)[:, None] == 129, np.nan, v).astype(np.float32)) for k, v in text.pairs]
    with pytest.raises(errors.NonFiniteError):
        db.import_chunk(spec, text.tokens, bad, name="a")
    with pytest.raises(errors.LayerError):
        db.import_chunk(spec, text.tokens, text.pairs[:1], name="a")
    assert blocks_used() == 0
    text.store(db, "a")
    used = blocks_used()
    with pytest.raises(errors.AlreadyExists):
        text.store(db, "a")
    with pytest.raises(errors.NotFound):
        db.create_session(spec, parts=["a", "a", "none"])
    assert blocks_used() == used


def test_new_orders_never_wear_out(db, spec, blocks_used, engine):
    """A hundred sessions of never-repeated orders, overlaid and decoded: when they are closed, nothing more is stored."""
    texts = {str(i): Text(spec, 20 + i, seed=i, base=i * 3) for i in range(6)}
    for name, text in texts.items():
        text.store(db, name)
    used, infos = blocks_used(), [replace(context.info, used=0.0, uses=0) for context in db.contexts()]
    for number, order in enumerate(list(permutations(texts))[:: 720 // 100][:100]):
        parts = [*order[:3], [5000 + number], *order[3:]]
        gap = sum(texts[name].n for name in order[:3])
        with db.create_session(spec, parts=parts) as session:
            fresh = Text(spec, 4, seed=number)
            for layer, (k, v) in enumerate(fresh.pairs):
                session.overlay(layer, [gap - 1, gap, gap + 1], k[:, :3], v[:, :3])
                session.attend(layer, fresh.q[layer][:, 3:], k[:, 3:], v[:, 3:])
            if number % 20 == 0:
                db.store(session, name="kept", tokens=[*session.tokens, 1])
        if number % 20 == 10:
            db.drop("kept")
        if number % 20 > 10:
            assert blocks_used() == used
    assert [replace(context.info, used=0.0, uses=0) for context in db.contexts()] == infos
    engine.check_integrity()
