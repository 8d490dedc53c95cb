"""Imports beside drops and other imports, and the queries that come with them."""

from dataclasses import replace

import numpy as np
import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, StorageConfig
from kvdb.database import Database
from kvdb.errors import AlreadyExists, CapacityError
from kvdb.indexing.advisor import IndexAdvisor
from kvdb.storage.block_table import BlockTable
from tests.reference import attention, relative_error

MIB = 1 << 20


@pytest.fixture
def movable(spec):
    """A small model whose chunks may stand anywhere."""
    return replace(spec, rope=kvdb.Rope())


def interleaved(pairs, *between):
    """The layers one by one; before all but the first, what is called in between."""
    for number, pair in enumerate(pairs):
        if number:
            for call in between:
                call()
        yield pair


def test_a_chunk_keeps_the_segment_its_import_began_with(db, movable, make_kv):
    """Its only other name is dropped while it is imported under a second one."""
    kv = make_kv(movable, 100)
    db.import_chunk(movable, kv.tokens, kv.pairs(), name="first")
    db.import_chunk(movable, kv.tokens, interleaved(kv.pairs(), lambda: db.drop("first")), name="second")
    (info,) = (context.info for context in db.contexts())
    assert (info.name, info.tokens, info.chunk) == ("second", 100, True)
    with db.create_session(movable, parts=["second"]) as session:
        for layer in range(movable.layers):
            last = kv.k[layer][:, -1:], kv.v[layer][:, -1:]
            out = session.attend(layer, kv.q[layer][:, :1], *last)
            keys, values = (np.concatenate(pair, axis=1) for pair in zip((kv.k[layer], kv.v[layer]), last, strict=True))
            assert relative_error(out, attention(kv.q[layer][:, :1], keys, values, movable.softmax_scale)[0]) <= 1e-5
    assert db.create_session(movable, kv.tokens).reused == 100
    assert db.name_chunk(movable, kv.tokens, name="third").name == "third"
    for name in ("second", "third"):
        db.drop(name)
    assert db.contexts() == []


def test_a_chunk_that_was_dropped_and_stored_anew_meanwhile_has_both(db, engine, movable, make_kv):
    kv = make_kv(movable, 100)
    db.import_chunk(movable, kv.tokens, kv.pairs(), name="first")

    def anew():
        db.drop("first")
        db.import_chunk(movable, kv.tokens, kv.pairs(), name="anew")

    db.import_chunk(movable, kv.tokens, interleaved(kv.pairs(), anew), name="second")
    engine.check_integrity()
    assert [context.tokens for context in db.contexts()] == [100, 100]
    for name in ("anew", "second"):
        db.drop(name)
        engine.check_integrity()
    assert sum(tier.blocks_used for tier in engine.tiers()) == 0


@pytest.fixture
def checked(monkeypatch):
    """`checked(engine, owner, name)`: the books are proven right in the middle of each call of that method, in its thread."""
    times = []

    def check_in(engine, owner, name):
        method = getattr(owner, name)

        def checking(*args, **named):
            engine.check_integrity()
            times.append(name)
            result = method(*args, **named)
            engine.check_integrity()
            return result

        monkeypatch.setattr(owner, name, checking)
        return times

    return check_in


def test_the_books_are_right_while_an_import_becomes_a_context_and_while_that_is_dropped(engine, spec, make_kv, checked):
    """The blocks have one owner the whole time, whoever that is."""
    kv = make_kv(spec, 100)
    checked(engine, IndexAdvisor, "published")
    times = checked(engine, BlockTable, "release")
    db = Client(engine)
    db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    db.drop("doc")
    assert times == ["published", *["release"] * spec.layers]


def test_two_imports_of_one_chunk_store_it_once(db, engine, movable, make_kv):
    kv = make_kv(movable, 100)
    within = interleaved(kv.pairs(), lambda: db.import_chunk(movable, kv.tokens, kv.pairs(), name="within"))
    db.import_chunk(movable, kv.tokens, within, name="around")
    assert sum(tier.blocks_used for tier in engine.tiers()) == movable.layers * 2
    with pytest.raises(AlreadyExists):
        db.import_chunk(movable, kv.tokens, kv.pairs(), name="within")


@pytest.fixture
def small():
    """A database of 16 MiB in all, whose blocks have all come back at the end."""
    with Database(Config(storage=StorageConfig(cpu_bytes_max=16 * MIB, eviction="none"))) as database:
        yield database
        assert sum(tier.blocks_used for tier in database.tiers()) == 0


def room(engine, spec):
    """How many tokens a session finds room for, a few at a time."""
    session, kv = engine.create_session(spec, np.zeros(0, np.int32)), np.ones((spec.kv_heads, 64, spec.head_dim), np.float32)
    tokens = 0
    try:
        while True:
            session.update(0, kv, kv)
            tokens += 64
    except CapacityError:
        return tokens
    finally:
        session.close()


def test_queries_that_come_with_an_import_count_as_long_as_they_are_kept(small, spec, make_kv):
    kv, token_nbytes = make_kv(spec, 100), spec.token_nbytes
    before = room(small, spec)
    queries = np.ones((spec.q_heads, 4 * MIB // spec.q_heads // spec.head_dim // 4, spec.head_dim), np.float32)
    assert queries.nbytes == 4 * MIB
    writing = small.begin_import(spec, kv.tokens, "document")
    for layer, (k, v) in enumerate(kv.pairs()):
        writing.write(layer, k, v)
        writing.sample(layer, queries)
        writing.sample(layer, queries)  # the last counts, the first no more
    writing.commit()
    assert before - room(small, spec) >= 8 * MIB // token_nbytes
    again = small.begin_import(spec, kv.tokens, "the same document")
    again.sample(0, queries)
    again.commit()  # of what is stored, nothing is kept twice
    assert before - room(small, spec) < 9 * MIB // token_nbytes
    aborted = small.begin_import(spec, np.arange(50), "another")
    aborted.sample(0, queries)
    with pytest.raises(CapacityError, match="cpu_bytes_max"):
        aborted.sample(1, queries)
    aborted.abort()
    small.drop("document")
    assert before - room(small, spec) < 9 * MIB // token_nbytes
    small.drop("the same document")
    assert room(small, spec) == before


def test_queries_of_a_chunk_that_is_stored_already_are_given_back(small, movable, make_kv):
    kv, before = make_kv(movable, 100), room(small, movable)
    for name in ("first", "second"):
        writing = small.begin_import(movable, kv.tokens, name, 0)
        writing.sample(0, kv.q[0])
        for layer, (k, v) in enumerate(kv.pairs() if not writing.start else []):
            writing.write(layer, k, v)
        writing.commit()
    for name in ("first", "second"):
        small.drop(name)
    assert room(small, movable) == before


def test_a_session_is_stored_without_its_queries_where_there_is_no_room_for_them(spec, make_kv):
    """They help indexes; the tokens are what is to be kept."""
    kv = make_kv(spec, 64)
    nbytes = spec.layers * 64 * spec.token_nbytes
    with Database(Config(storage=StorageConfig(cpu_bytes_max=nbytes))) as engine:
        session = engine.create_session(spec, np.zeros(0, np.int32))
        for layer, (k, v) in enumerate(kv.pairs()):
            session.attend(layer, kv.q[layer], k, v)
        assert session.store("kept", kv.tokens).tokens == 64
        session.close()
        assert engine.explain("kept", 0, kvdb.QueryOptions(), analyze=False)
        engine.check_integrity()
