"""Sessions on contexts that are larger than main memory answer as if all of it were there."""

import threading
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import CapacityError, IntegrityError, Unavailable
from kvdb.storage.paged_segment import PagedLayer
from tests.kvdb.catalog.offloading import SPEC, answers, change, held, same
from tests.racing import race

TOKENS = 2048
LAYER_NBYTES = TOKENS * SPEC.token_nbytes
TWO_LAYERS = 5 * LAYER_NBYTES // 2
"""A budget for two of a context's four layers, and for the session's own tokens."""
QUIET = IndexConfig(automatic=False, on_demand="")


@contextmanager
def store(folder, cpu_bytes_max=None):
    """An engine and a client of a durable store; at the end nothing is left of what it took."""
    storage = StorageConfig(arena_bytes=1 << 20, path=str(folder), cpu_bytes_max=cpu_bytes_max)
    engine = Database(Config(storage=storage, indexes=QUIET))
    try:
        yield engine, Client(engine)
        engine.check_integrity()
    finally:
        engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvdb-load")]


@pytest.fixture(scope="module")
def documents():
    """Two documents of the same length."""
    from tests.conftest import Kv

    return [Kv(SPEC, TOKENS, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory, documents):
    """A store with the two, "doc-0" and "doc-1", which a test may open but not change."""
    folder = tmp_path_factory.mktemp("paged") / "store"
    with store(folder) as (_, db):
        for i, kv in enumerate(documents):
            db.import_context(SPEC, kv.tokens, kv.pairs(), name=f"doc-{i}")
    return folder


@pytest.fixture(scope="module")
def right(stored, documents):
    """What the layers of each document answer when all of it is in memory."""
    with store(stored) as (_, db):
        return [answers(db.create_session(SPEC, kv.tokens), kv) for kv in documents]


@pytest.fixture(scope="module")
def resident(documents):
    """A client of a database that holds both documents in memory."""
    with Database(Config(indexes=QUIET)) as engine:
        db = Client(engine)
        for i, kv in enumerate(documents):
            db.import_context(SPEC, kv.tokens, kv.pairs(), name=f"doc-{i}")
        yield db


def decoded(session, kv, steps):
    """The outputs of some decode steps, each of all layers."""
    rows = [(layer, slice(at, at + 1)) for at in range(steps) for layer in range(SPEC.layers)]
    return [session.attend(layer, *(a[layer][:, at] for a in (kv.q, kv.k, kv.v)), retrieval=kvdb.Exact()) for layer, at in rows]


def searched(session, kv):
    return [session.attention(layer, kv.q[layer][:, :1], retrieval=kvdb.TopK(40)) for layer in range(SPEC.layers)]


def test_a_context_that_does_not_fit_answers_the_same_bits(stored, documents, right):
    with store(stored, TWO_LAYERS) as (engine, db):
        for _ in range(2):
            session = db.create_session(SPEC, documents[0].tokens)
            assert session.reused == TOKENS
            assert same(answers(session, documents[0]), right[0])
            assert held(engine, "paged") <= 2 * TOKENS // 64
            engine.check_integrity()
            session.close()


def test_explain_says_what_is_in_memory(stored, documents):
    with store(stored, TWO_LAYERS) as (_, db):
        session = db.create_session(SPEC, documents[0].tokens)
        rest = f"of {LAYER_NBYTES:,} bytes are in memory, the rest is read from disk as far as it is asked for"
        assert f"Paged: 0 {rest}" in str(session.explain(2))
        session.attention(2, documents[0].q[2][:, :1])
        assert f"Paged: {LAYER_NBYTES:,} {rest}" in str(session.explain(2))
        session.attention(2, documents[0].q[2][:, :1], retrieval=kvdb.Exact())
        assert "exact" in str(session.explain(2, analyze=True)).lower()
    with store(stored) as (_, db):
        assert "Paged" not in str(db.create_session(SPEC, documents[0].tokens).explain(2))


def test_decoding_and_forks_over_it_give_the_same_bits(stored, documents):
    outs = []
    for budget in (None, TWO_LAYERS):
        with store(stored, budget) as (_, db):
            session = db.create_session(SPEC, documents[0].tokens)
            first = decoded(session, documents[1], 3)
            fork = session.fork()
            outs.append([*first, *decoded(fork, documents[1], 3), *decoded(session, documents[1], 2)])
    assert same(*outs)


def test_two_contexts_in_turns_and_together(stored, documents, right):
    with store(stored, TWO_LAYERS + LAYER_NBYTES) as (engine, db):
        sessions = [db.create_session(SPEC, kv.tokens) for kv in documents]
        for _ in range(3):
            for session, kv, expected in zip(sessions, documents, right, strict=True):
                assert same(answers(session, kv), expected)
        for layer in range(SPEC.layers):
            q = np.stack([kv.q[layer, :, :1] for kv in documents])
            together = db.attention(sessions, layer, q, retrieval=kvdb.Exact())
            alone = [s.attention(layer, q[i], retrieval=kvdb.Exact()) for i, s in enumerate(sessions)]
            np.testing.assert_allclose(together.astype(np.float32), np.stack(alone).astype(np.float32), atol=0.02)
        engine.check_integrity()


def test_threads_that_share_a_context_get_the_same_bits(stored, documents, right):
    wrong = []
    with store(stored, TWO_LAYERS + LAYER_NBYTES) as (_, db):

        def ask(number):
            session = db.create_session(SPEC, documents[number % 2].tokens)
            for turn in range(3):
                layers = np.random.default_rng([number, turn]).permutation(SPEC.layers).tolist()
                expected = [right[number % 2][layer] for layer in layers]
                if not same(answers(session, documents[number % 2], layers), expected):
                    wrong.append((number, turn))
            session.close()

        race(*(partial(ask, number) for number in range(4)), seconds=0)
    assert not wrong


def test_threads_that_open_contexts_at_once_all_find_room(stored, documents):
    with store(stored, TWO_LAYERS + LAYER_NBYTES) as (engine, db):

        def reopen(number):
            db.create_session(SPEC, documents[number % 2].tokens).close()
            db.offload(f"doc-{number % 2}")

        race(*(partial(reopen, number) for number in range(4)))
        engine.check_integrity()


CALLS = st.sampled_from(["open", "close", "ask", "decode"])
STEPS = st.tuples(CALLS, st.integers(0, 1), st.integers(0, SPEC.layers - 1), st.booleans())


@given(st.integers(2, 3), st.lists(STEPS, min_size=1, max_size=12))
def test_any_course_of_sessions_answers_as_from_memory(stored, resident, documents, layers, course):
    with store(stored, layers * LAYER_NBYTES + LAYER_NBYTES // 2) as (small, db):
        open_sessions = []
        for what, which, layer, searched in course:
            kv, retrieval = documents[which], kvdb.TopK(40) if searched else kvdb.Exact()
            if what == "open" or not open_sessions:
                try:
                    session = db.create_session(SPEC, kv.tokens)
                except CapacityError:
                    assert open_sessions  # which have taken what there is
                    continue
                open_sessions.append((session, resident.create_session(SPEC, kv.tokens)))
            elif what == "close":
                for session in open_sessions.pop(which % len(open_sessions)):
                    session.close()
            else:
                pair = open_sessions[which % len(open_sessions)]
                row = kv.q[layer, :, :1], kv.k[layer, :, :1], kv.v[layer, :, :1]
                if what == "ask":
                    outs = [session.attention(layer, row[0], retrieval=retrieval) for session in pair]
                else:
                    outs = [session.attend(layer, *row, retrieval=retrieval) for session in pair]
                assert same(*([out] for out in outs))
        small.check_integrity()
        for pair in open_sessions:
            for session in pair:
                session.close()


def test_a_build_and_a_check_of_indexes_bring_layers_in(stored, documents):
    outs = []
    for budget in (None, TWO_LAYERS):
        with store(stored, budget) as (_, db):
            (info,) = db.build_index("doc-0", "flat")
            assert (info.state, info.layers) == ("ready", SPEC.layers)
            assert db.verify("doc-0").indexes == SPEC.layers
            outs.append(searched(db.create_session(SPEC, documents[0].tokens), documents[0]))
    assert same(*outs)


def test_tokens_are_read_back_and_cut_off(stored, documents):
    kv, kept = documents[0], TOKENS // 2
    with store(stored) as (_, db):
        right = answers(db.create_session(SPEC, kv.tokens[:kept]), kv)
    with store(stored, TWO_LAYERS) as (engine, db):
        session = db.create_session(SPEC, kv.tokens)
        for layer in range(SPEC.layers):
            k, v = session.read(layer, 5, 99)
            assert (k == kv.k[layer][:, 5:99]).all()
            assert (v == kv.v[layer][:, 5:99]).all()
        session.truncate(kept)
        assert same(answers(session, kv), right)
        engine.check_integrity()


def test_compaction_leaves_what_does_not_fit_as_it_is(tmp_path, documents):
    """Its blocks come and go, so no other segment may share them."""
    whole, half = documents[0], documents[0].tokens[: TOKENS // 2 + 10].copy()
    with store(tmp_path / "store") as (_, db):
        db.import_context(SPEC, whole.tokens, whole.pairs(), name="whole")
        db.import_context(SPEC, half, whole.pairs(0, len(half)), name="half")
        right = answers(db.create_session(SPEC, half), whole)
    with store(tmp_path / "store", LAYER_NBYTES + LAYER_NBYTES // 4) as (engine, db):
        session = db.create_session(SPEC, half)
        assert held(engine, "paged") == 0
        db.drop("whole")
        assert engine.compact() == 0
        assert same(answers(session, whole), right)
        engine.check_integrity()
    with store(tmp_path / "store") as (engine, db):
        assert same(answers(db.create_session(SPEC, half), whole), right)
        engine.compact()
        assert same(answers(db.create_session(SPEC, half), whole), right)


def test_idle_contexts_make_room_for_one_that_is_larger_than_memory(tmp_path, documents, make_kv):
    large = make_kv(SPEC, TOKENS * 3 // 2, seed=3)
    with store(tmp_path / "store") as (_, db):
        db.import_context(SPEC, documents[0].tokens, documents[0].pairs(), name="idle")
        db.import_context(SPEC, large.tokens, large.pairs(), name="large")
        right = answers(db.create_session(SPEC, large.tokens), large)
    with store(tmp_path / "store", 9 * LAYER_NBYTES // 2) as (engine, db):
        db.create_session(SPEC, documents[0].tokens).close()
        assert held(engine, "cpu") == SPEC.layers * TOKENS // 64
        assert same(answers(db.create_session(SPEC, large.tokens), large), right)
        assert held(engine, "cpu") == 0


@pytest.fixture
def own_store(tmp_path, documents):
    """A store with one document, and the path of its file."""
    with store(tmp_path / "store") as (_, db):
        db.import_context(SPEC, documents[0].tokens, documents[0].pairs(), name="doc")
    (path,) = (tmp_path / "store").rglob("*.segment")
    return tmp_path / "store", path


@pytest.mark.needs_folder
def test_a_byte_that_changes_in_the_middle_of_decoding_is_never_served(own_store, documents, right):
    folder, path = own_store
    extent = (path.stat().st_size - 4096) // SPEC.layers
    at = 4096 + 2 * extent + 1234
    with store(folder, TWO_LAYERS) as (engine, db):
        session = db.create_session(SPEC, documents[0].tokens)
        answers(session, documents[0])  # the third layer has left memory for the first of the next step
        change(path, at)
        for _ in range(2):
            with pytest.raises(IntegrityError, match="of layer 2 does not match its checksum"):
                session.attend(2, *(array[2, :, :1] for array in (documents[0].q, documents[0].k, documents[0].v)))
            assert same(answers(session, documents[0], [0, 1]), right[0][:2])
            engine.check_integrity()
        change(path, at)
        assert same(answers(session, documents[0]), right[0])
        assert session.stats().tail_tokens == 0


@pytest.mark.needs_folder
def test_a_file_that_goes_away_is_unavailable_and_comes_back(own_store, documents, right):
    folder, path = own_store
    with store(folder, TWO_LAYERS) as (_, db):
        session = db.create_session(SPEC, documents[0].tokens)
        answers(session, documents[0])  # the third layer has left memory for the first of the next step
        path.rename(path.with_name("gone"))
        with pytest.raises(Unavailable, match="cannot be read"):
            answers(session, documents[0], [2])
        path.with_name("gone").rename(path)
        assert same(answers(session, documents[0]), right[0])


def test_the_room_of_open_sessions_is_kept_from_imports(stored, documents, make_kv, right):
    with store(stored, TWO_LAYERS) as (_, db):
        session = db.create_session(SPEC, documents[0].tokens)
        more = make_kv(SPEC, TOKENS // 2, seed=5)
        with pytest.raises(CapacityError):
            db.import_context(SPEC, more.tokens, more.pairs(), name="more")
        assert same(answers(session, documents[0]), right[0])


def test_nothing_takes_the_room_of_what_is_still_being_read(stored, documents, right, monkeypatch):
    """Room is wanted when all of a layer has come, but before anybody knows."""
    read, still_there = PagedLayer.read, []

    def read_while_room_is_wanted(layer):
        read(layer)
        with suppress(CapacityError):
            layer.segment.pool._room.budget.check(1 << 40)
        still_there.append(layer.resident)

    monkeypatch.setattr(PagedLayer, "read", read_while_room_is_wanted)
    with store(stored, TWO_LAYERS) as (_, db):
        session = db.create_session(SPEC, documents[0].tokens)
        assert same(answers(session, documents[0]), right[0])
    assert len(still_there) >= SPEC.layers
    assert all(still_there)


@pytest.mark.needs_folder
def test_an_import_takes_the_room_of_what_nobody_reads(own_store, documents, make_kv):
    folder, _ = own_store
    with store(folder, TWO_LAYERS) as (engine, db):
        session = db.create_session(SPEC, documents[0].tokens)
        answers(session, documents[0])
        session.close()
        before = held(engine, "paged")
        more = make_kv(SPEC, TOKENS // 2, seed=5)
        db.import_context(SPEC, more.tokens, more.pairs(), name="more")
        assert held(engine, "paged") < before
