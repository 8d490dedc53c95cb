"""Searches over contexts larger than main memory read the pages that they need, and answer as if all of it were there."""

import re
from contextlib import contextmanager
from functools import partial
from shutil import copytree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import IntegrityError, Unavailable
from tests.kvdb.catalog.offloading import SPEC, change
from tests.racing import race

TOKENS = 4096
LAYER_NBYTES = TOKENS * SPEC.token_nbytes
KINDS = ["flat", "quantized", "coarse-bounds", "coarse-means", "coarse-clusters", "hnsw"]
BUDGET = 3 * LAYER_NBYTES // 2
"""For one layer of four, and the session's own tokens."""


@contextmanager
def store(folder, cpu_bytes_max=None):
    """An engine and a client of a durable store."""
    storage = StorageConfig(arena_bytes=1 << 20, path=str(folder), cpu_bytes_max=cpu_bytes_max)
    with Database(Config(storage=storage, indexes=IndexConfig(automatic=False, on_demand=""))) as engine:
        yield engine, Client(engine)
        engine.check_integrity()


@pytest.fixture(scope="module")
def kv():
    from tests.conftest import Kv

    return Kv(SPEC, TOKENS, seed=3)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory, kv):
    """A store with a document under an index of each kind, which a test may open but not change."""
    folder = tmp_path_factory.mktemp("pages") / "store"
    with store(folder) as (_, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        for kind in KINDS:
            db.build_index("doc", kind)
    return folder


@pytest.fixture(scope="module")
def whole(indexed):
    """A client of a copy of that store with all of it in memory."""
    copy = indexed.with_name("whole")
    copytree(indexed, copy)
    with store(copy) as (_, db):
        for kind in KINDS:
            db.build_index("doc", kind)
        yield db


@pytest.fixture(scope="module")
def small(indexed):
    """An engine and a client of that store with memory for a third of it."""
    with store(indexed, BUDGET) as (engine, db):
        for kind in KINDS:
            db.build_index("doc", kind)
        yield engine, db


def options(kind, retrieval):
    return kvdb.QueryOptions(retrieval, hints=kvdb.Hints(index=kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_reads_a_part_of_its_layer(small, kv, kind):
    engine, db = small
    session = db.create_session(SPEC, kv.tokens)
    asked = options(kind, kvdb.TopK(1))
    for layer in range(SPEC.layers):
        session.attention(layer, kv.q[layer][:, :1], options=asked)
        plan = str(session.explain(layer, options=asked))
        assert kind in plan
        assert "Paged: 0 of" not in plan
    assert not all(f"Paged: {LAYER_NBYTES:,} of" in str(session.explain(layer, options=asked)) for layer in range(SPEC.layers))
    engine.check_integrity()
    session.close()


def test_explain_says_what_the_last_search_had_to_read(small, kv):
    _, db = small
    asked = options("coarse-clusters", kvdb.Dipr(0.2))
    with db.create_session(SPEC, kv.tokens) as session:
        session.attention(1, np.zeros_like(kv.q[1][:, :1]), options=kvdb.QueryOptions(kvdb.Exact()))
        session.attention(3, kv.q[3][:, :1], options=kvdb.QueryOptions(kvdb.Exact()))  # which leaves nothing of layer 1
        assert "Pages Read" not in str(session.explain(1, options=asked))
        session.attention(1, kv.q[1][:, :1], options=asked)
        pages, batches = last_reads(session.explain(1, options=asked))
        assert 0 < batches <= 3 <= pages  # thresholds, keys and values, each read at once
        assert last_reads(session.explain(1, options=asked, analyze=True)) == (pages, batches)
        session.attention(1, kv.q[1][:, :1], options=asked)
        assert last_reads(session.explain(1, options=asked, analyze=True)) == (0, 0)


def last_reads(plan):
    """The pages and batches that a plan says the last search read."""
    return tuple(map(int, re.search(r"Pages Read: (\d+) in (\d+) batches by the last search, which waited", str(plan)).groups()))


STEPS = st.tuples(st.sampled_from(KINDS), st.integers(0, SPEC.layers - 1), st.integers(0, 40), st.booleans(), st.integers(1, 3))


@given(st.lists(STEPS, min_size=1, max_size=12))
def test_any_course_of_searches_answers_as_from_memory(small, whole, kv, course):
    engine, db = small
    sessions = [client.create_session(SPEC, kv.tokens) for client in (db, whole)]
    for kind, layer, at, ranged, n in course:
        asked = options(kind, kvdb.Dipr(0.2) if ranged else kvdb.TopK(1 + at % 7))
        outs = [session.attention(layer, kv.q[layer][:, at : at + n], options=asked) for session in sessions]
        assert (outs[0] == outs[1]).all()
    engine.check_integrity()
    for session in sessions:
        session.close()


def test_decode_steps_answer_as_from_memory(small, whole, kv):
    outs, asked = [], options("flat", kvdb.TopK(4))
    for client in (small[1], whole):
        session = client.create_session(SPEC, kv.tokens)
        rows = [[array[layer][:, 7:8] for array in (kv.q, kv.k, kv.v)] for layer in range(SPEC.layers)]
        outs.append([session.attend(layer, *row, options=asked) for _ in range(20) for layer, row in enumerate(rows)])
        session.close()
    assert all((one == other).all() for one, other in zip(*outs, strict=True))


def test_threads_that_search_one_context_get_the_same_bits(small, whole, kv):
    asked = options("flat", kvdb.TopK(3))
    expected_session = whole.create_session(SPEC, kv.tokens)
    expected = [
        [expected_session.attention(n, kv.q[n][:, at : at + 1], options=asked) for at in range(8)] for n in range(SPEC.layers)
    ]
    wrong = []

    def ask(number):
        session = small[1].create_session(SPEC, kv.tokens)
        for turn in np.random.default_rng(number).permutation(32).tolist():
            layer, at = turn % SPEC.layers, turn // SPEC.layers
            if not (session.attention(layer, kv.q[layer][:, at : at + 1], options=asked) == expected[layer][at]).all():
                wrong.append((number, turn))
        session.close()

    race(*(partial(ask, number) for number in range(3)), seconds=0)
    assert not wrong


@pytest.mark.needs_folder
def test_a_changed_byte_is_an_error_for_who_needs_its_page_alone(tmp_path, kv):
    asked = options("flat", kvdb.TopK(2))
    with store(tmp_path / "store") as (_, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        db.build_index("doc", "flat")
        session = db.create_session(SPEC, kv.tokens)
        right = [session.attention(2, kv.q[2][:, at : at + 1], options=asked) for at in range(40)]
    (path,) = (tmp_path / "store").rglob("*.segment")
    extent = LAYER_NBYTES
    start = path.stat().st_size - (SPEC.layers - 2) * extent
    at = start + 10 * 4096 + 77
    with store(tmp_path / "store", BUDGET) as (engine, db):
        db.build_index("doc", "flat")
        session = db.create_session(SPEC, kv.tokens)
        session.attention(0, kv.q[0][:, :1], retrieval=kvdb.Exact())  # and layer 1 is read ahead: layer 2 goes
        said: list[str] = []
        change(path, at)
        for number, expected in enumerate(right):
            try:
                assert (session.attention(2, kv.q[2][:, number : number + 1], options=asked) == expected).all()
            except IntegrityError as error:
                said.append(str(error))
            engine.check_integrity()
        assert 0 < len(said) < len(right)
        assert all("of layer 2 does not match its checksum" in message for message in said)
        change(path, at)
        session.attention(0, kv.q[0][:, :1], retrieval=kvdb.Exact())
        for number, expected in enumerate(right):
            assert (session.attention(2, kv.q[2][:, number : number + 1], options=asked) == expected).all()


@pytest.mark.needs_folder
def test_a_file_that_goes_away_is_unavailable_and_comes_back(tmp_path, kv):
    asked = options("flat", kvdb.TopK(2))
    with store(tmp_path / "store") as (_, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        db.build_index("doc", "flat")
    (path,) = (tmp_path / "store").rglob("*.segment")
    with store(tmp_path / "store", BUDGET) as (_, db):
        db.build_index("doc", "flat")
        session = db.create_session(SPEC, kv.tokens)
        right = session.attention(1, kv.q[1][:, :1], options=asked)
        session.attention(0, kv.q[0][:, :1], retrieval=kvdb.Exact())
        path.rename(path.with_name("gone"))
        with pytest.raises(Unavailable, match="cannot be read"):
            session.attention(2, kv.q[2][:, :1], options=asked)
        path.with_name("gone").rename(path)
        assert (session.attention(1, kv.q[1][:, :1], options=asked) == right).all()
