"""Contexts make room for what is new: the least used first, never what is pinned or read, and an import that finds none is told
why."""

import math
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import pytest

import kvdb
from kvdb.catalog.contexts import residency
from kvdb.errors import CapacityError, NotFound
from tests.stores import SPEC, config, connect, holds, kv_of, names, put
from tests.waiting import until

BLOCK = 2 * 16 * 64 * 4
"""Bytes of a block of one layer."""
CONTEXT = 2 * 2 * BLOCK
"""Bytes of a context of 128 tokens."""


def indexed(**storage):
    """The settings of a database in which short segments get indexes too, when they are asked for."""
    plain = config(**storage)
    return replace(plain, indexes=replace(plain.indexes, segment_tokens_min=64))


def tokens(number):
    """128 tokens that begin as no other number's do."""
    return np.r_[number, (np.arange(127) + number) % 50]


@pytest.fixture
def db(request, tmp_path):
    """A database with room for four contexts; its parameter is where it may keep more."""
    place = {"memory": {}, "disk": {"disk_path": str(tmp_path)}}
    settings = {"cpu_bytes_max": 4 * CONTEXT, **place[getattr(request, "param", "memory")]}
    with connect(None, **settings) as db:
        yield db


def test_what_was_used_longest_ago_is_dropped(db):
    for number in range(4):
        put(db, tokens(number), str(number))
    assert holds(db, tokens(0))
    put(db, tokens(4), "4")
    assert names(db) == ["0", "2", "3", "4"]


def test_what_is_pinned_stays_and_an_import_is_refused_when_all_is(db):
    for number in range(4):
        put(db, tokens(number), str(number))
    db.pin("0", "1", "2", "3")
    with pytest.raises(CapacityError, match="nothing that is stored can go: '0', '1', '2', '3' are pinned"):
        put(db, tokens(4), "4")
    db.unpin("1")
    put(db, tokens(4), "4")
    assert names(db) == ["0", "2", "3", "4"]


def test_what_a_session_reads_stays(db):
    for number in range(4):
        put(db, tokens(number), str(number))
    with db.create_session(SPEC, tokens(0)):
        for number in range(4, 8):
            put(db, tokens(number), str(number))
        assert names(db) == ["0", "5", "6", "7"]
    sessions = [db.create_session(SPEC, tokens(number)) for number in (0, 5, 6, 7)]
    with pytest.raises(CapacityError, match="'0', '5', '6', '7' are in use by sessions; try again"):
        put(db, tokens(8), "8")
    for session in sessions:
        session.close()


def test_a_tail_is_given_room(db):
    for number in range(3):
        put(db, tokens(number), str(number))
    long = np.arange(200) % 50
    with db.create_session(SPEC, []) as session:
        for layer, (k, v) in enumerate(kv_of(long)):
            session.update(layer, k, v)
        assert names(db) == ["1", "2"]
        session.store("long", long)
    assert holds(db, long)


def test_a_shared_beginning_outlives_what_hangs_behind_it(db):
    shared = tokens(0)
    put(db, shared, "shared")
    for number in range(1, 8):
        put(db, np.r_[shared, 60 - number, np.arange(63) % 50], f"behind {number}")
        assert holds(db, shared)
    assert "shared" in names(db)


@pytest.mark.parametrize("db", ["disk"], indirect=True)
def test_two_sessions_share_the_room_of_the_only_context_that_may_go(db):
    """The second finds nothing to go that is not on its way already, and is not refused for that."""
    for number in range(4):
        put(db, tokens(number), str(number))
    db.pin("0", "1", "2")
    going = db._transport._catalog.get("3").views[0].segment
    held = going.references
    keys, values = kv_of(tokens(9)[:64])[0]
    with db.create_session(SPEC, []) as one, db.create_session(SPEC, []) as other, ThreadPoolExecutor(2) as threads:
        with going._write_lock:  # writing takes its time
            first = threads.submit(one.update, 0, keys, values)
            until(lambda: going.references > held)
            second = threads.submit(other.update, 0, keys, values)
            wait([second], timeout=0.1)
        first.result()
        second.result()
        assert not db.get("3").info.resident


@pytest.mark.parametrize("db", ["disk"], indirect=True)
def test_a_session_whose_room_another_took_is_given_room_again(db, monkeypatch):
    for number in range(5):
        put(db, tokens(number), str(number))
    assert not db.get("0").info.resident
    made = residency.make_room

    def made_and_taken(views, budget):
        made(views, budget)
        put(db, tokens(5), "5")

    monkeypatch.setattr(residency, "make_room", made_and_taken)
    assert holds(db, tokens(0))


@pytest.mark.parametrize("db", ["disk"], indirect=True)
def test_segments_go_to_disk_and_come_back(db):
    for number in range(12):
        put(db, tokens(number), str(number))
    assert len(names(db)) == 12
    for number in range(12):
        assert holds(db, tokens(number))


def test_contexts_are_dropped_from_a_full_disk(tmp_path):
    with connect(tmp_path, disk_bytes_max=80_000) as db:
        for number in range(3):
            put(db, tokens(number), str(number))
        assert 0 < len(names(db)) < 3
        assert "2" in names(db)
        assert holds(db, tokens(2))


def test_nothing_goes_by_itself_where_the_setting_says_so():
    with connect(None, cpu_bytes_max=4 * CONTEXT, eviction="none") as db:
        for number in range(4):
            put(db, tokens(number), str(number))
        with pytest.raises(CapacityError, match="drop contexts"):
            put(db, tokens(4), "4")
        assert len(names(db)) == 4


@pytest.mark.parametrize("eviction", ["lru", "reuse"])
def test_every_policy_makes_room_and_leaves_whole_contexts(eviction):
    rng = np.random.default_rng(3)
    with connect(None, cpu_bytes_max=4 * CONTEXT, eviction=eviction) as db:
        for step in range(40):
            number = int(rng.integers(9))
            if str(number) in names(db):
                assert holds(db, tokens(number))
            else:
                put(db, tokens(number), str(number))
            assert len(names(db)) <= 4, step


def test_what_is_over_is_dropped_before_anything_else(db):
    for number in range(4):
        put(db, tokens(number), str(number))
    db.update("3", ttl=1e-9)
    db.update("2", ttl=1000)
    assert names(db) == ["0", "1", "2"]
    put(db, tokens(4), "4")
    assert names(db) == ["0", "1", "2", "4"]
    db.update("2", ttl=math.inf)
    assert db.get("2").info.expires is None
    with pytest.raises(NotFound):
        db.get("3")


def counting_all(db):
    """The budget of a database, in which every byte beside blocks counts from now on."""
    budget = db._transport._blocks.budget
    budget.take(budget._counted(budget._beside + budget._free_beside) - budget._counted(budget._beside))
    budget._free_beside = 0
    return budget


def index_nbytes(db, name):
    return sum(view.segment.indexes.nbytes for view in db._transport._catalog.get(name).views)


def test_segments_with_indexes_in_memory_go_after_those_without(tmp_path):
    long = {name: (np.arange(512) + number) % 50 for number, name in enumerate("abcdefgh")}
    with kvdb.connect(config=indexed(disk_path=str(tmp_path), cpu_bytes_max=16 * CONTEXT)) as db:
        for name in "abcd":
            put(db, long[name], name)
        db.build_index("a", "flat")
        assert index_nbytes(db, "a")
        put(db, long["e"], "e")
        assert [one.name for one in db.contexts() if not one.info.resident] == ["b"], "a was used longest ago, and has an index"
        for name in "fgh":
            put(db, long[name], name)
        assert db.get("a").info.resident
        for number in range(8):
            put(db, (np.arange(512) * 3 + number) % 50, f"other {number}")
        assert not db.get("a").info.resident, "an index that nobody asks is not favoured for ever"
        assert holds(db, long["a"])


def test_indexes_count_in_the_budget_as_long_as_they_are_in_memory(tmp_path):
    doc = np.arange(512) % 50
    with kvdb.connect(config=indexed(disk_path=str(tmp_path), cpu_bytes_max=64 * CONTEXT)) as db:
        budget = counting_all(db)
        put(db, doc, "doc")
        before = budget.left
        db.build_index("doc", "flat")
        assert index_nbytes(db, "doc") > 0
        assert before - budget.left == index_nbytes(db, "doc")
        db.offload("doc")
        assert budget.left >= before
        put(db, doc + 1, "other")
        db.build_index("other", "flat")
        db.drop("other")
        assert budget.left >= before


def test_no_context_is_dropped_for_an_index():
    doc = np.arange(512) % 50
    with kvdb.connect(config=indexed(cpu_bytes_max=5 * CONTEXT)) as db:
        counting_all(db)
        put(db, doc, "doc")
        with pytest.raises(CapacityError, match="cpu_bytes_max"):
            db.build_index("doc", "flat")
        assert names(db) == ["doc"]
        assert holds(db, doc)
