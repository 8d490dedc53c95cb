"""How long contexts are kept, what is noted of them, and how they were used: the same for every client, and after a restart."""

import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import kvdb
from kvdb.config import ServerConfig
from kvdb.database import Database
from kvdb.errors import AlreadyExists, InvalidArgument, NotFound
from kvdb.server.serve import Server
from kvdb.types import ContextUpdate
from tests.stores import SPEC, config, connect, holds, names, put

DOC = np.arange(100) % 50
JSON = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4), st.lists, max_leaves=4)


@pytest.fixture
def served(tmp_path):
    """Two clients of one server, whose store is in `tmp_path`."""
    with Database(config(path=str(tmp_path))) as engine:
        server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
        server.start()
        try:
            with kvdb.connect(server.target) as one, kvdb.connect(server.target) as other:
                yield one, other
        finally:
            server.stop(grace=0)


def life(db, name):
    info = db.get(name).info
    return info.pinned, info.expires, info.metadata, info.uses


def test_what_one_client_says_of_a_context_holds_for_the_other(served):
    one, other = served
    put(one, DOC, "doc")
    one.pin("doc")
    before = time.time()
    one.update("doc", ttl=1000, metadata={"source": "wiki", "pages": [1, 2]})
    assert holds(other, DOC)
    pinned, expires, metadata, uses = life(other, "doc")
    assert pinned
    assert 999 < expires - before < 1010
    assert metadata == {"source": "wiki", "pages": [1, 2]}
    assert uses == 1
    other.unpin("doc")
    assert not life(one, "doc")[0]
    assert other.rename("doc", "paper").name == "paper"
    assert names(one) == ["paper"]
    assert holds(one, DOC)


def test_a_life_outlives_the_database(tmp_path):
    with connect(tmp_path) as db:
        for name in ("doc", "other"):
            put(db, np.r_[DOC, len(name)], name)
        db.pin("doc")
        db.update("other", ttl=1000, metadata={"a": None})
        for _ in range(3):
            assert holds(db, np.r_[DOC, 3])
        db.rename("doc", "renamed")
        before = [replace(context.info, resident=False) for context in db.contexts()]
    assert [info.uses for info in before] == [0, 4]  # the import of the other one was the first
    with connect(tmp_path) as db:
        assert [context.info for context in db.contexts()] == before
        assert names(db) == ["other", "renamed"]
        assert holds(db, np.r_[DOC, 3])
        db.drop("renamed")
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as catalog:
        assert catalog.execute("SELECT name FROM life").fetchall() == [("other",)]


def test_uses_are_written_with_others_and_not_each_by_itself(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        written = (tmp_path / "catalog.db").stat().st_mtime_ns
        for _ in range(5):
            assert holds(db, DOC)
        assert (tmp_path / "catalog.db").stat().st_mtime_ns == written


@settings(max_examples=15)
@given(noted=st.lists(st.dictionaries(st.sampled_from("abc"), JSON, max_size=3), min_size=1, max_size=4), wanted=st.data())
def test_contexts_are_found_by_what_is_noted_of_them(noted, wanted):
    with connect(None) as db:
        for number, metadata in enumerate(noted):
            put(db, [number], str(number))
            db.update(str(number), metadata=metadata)
        asked = wanted.draw(st.sampled_from(noted))
        key = wanted.draw(st.sampled_from([*asked, None]))
        query = asked if key is None else {key: asked[key]}
        found = [str(number) for number, metadata in enumerate(noted) if {**metadata, **query} == metadata]
        assert [context.name for context in db.contexts(metadata=query)] == found
        assert [context.name for context in db.contexts(metadata=query, limit=1, after=found[0])] == found[1:2]


def test_a_use_counts_for_contexts_that_end_with_what_was_reused():
    behind = np.r_[DOC, np.arange(100) % 7]
    with connect(None) as db:
        put(db, DOC, "doc")
        put(db, behind, "behind")
        uses = {context.name: context.info.uses for context in db.contexts()}
        for tokens in (behind, np.r_[DOC, 49]):
            with db.create_session(SPEC, tokens) as session:
                assert session.reused >= len(DOC)
        more = {context.name: context.info.uses - uses[context.name] for context in db.contexts()}
        assert more["doc"] == 2
        assert more["behind"] >= 1  # twice, if both have become one segment


def test_what_is_over_is_gone_and_its_name_is_free(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        db.pin("doc")
        db.update("doc", ttl=1e-9)
        put(db, DOC, "doc")
        assert not life(db, "doc")[0]
        db.update("doc", ttl=1e-9)
        assert names(db) == []
        with pytest.raises(NotFound):
            db.get("doc")
        with db.create_session(SPEC, DOC) as session:
            assert not session.reused
        assert not list(tmp_path.glob("segments/*"))


def test_a_name_that_is_taken_is_refused(served):
    for db in served:
        with pytest.raises(NotFound):
            db.rename("nobody", "somebody")
    put(served[0], DOC, "doc")
    put(served[0], DOC[:50], "half")
    for db in served:
        with pytest.raises(AlreadyExists):
            db.rename("doc", "half")
        assert db.rename("doc", "doc").name == "doc"
    assert names(served[0]) == ["doc", "half"]


@pytest.mark.parametrize(
    "wrong",
    [{"ttl": 0}, {"ttl": -1}, {"ttl": float("nan")}, {"ttl": True}, {"ttl": "1"}]
    + [{"metadata": wrong} for wrong in ([], "text", {1: 2}, {"a": float("nan")}, {"a": object()}, {"a": "x" * 20_000})]
    + [{"pinned": 7.5}],
)
def test_what_cannot_be_is_refused(wrong):
    with connect(None) as db:
        put(db, DOC, "doc")
        before = db.get("doc").info
        with pytest.raises(InvalidArgument):
            db.update("doc", **wrong)
        assert db.get("doc").info == before


def test_an_update_that_says_nothing_changes_nothing():
    with connect(None) as db:
        put(db, DOC, "doc")
        assert db.update("doc").info == db.get("doc").info
        assert ContextUpdate() == ContextUpdate(None, None, None, None)


def test_uses_that_cannot_be_written_keep_no_store_from_closing(tmp_path, caplog):
    """Where the catalogue is damaged so that it can be read and not written, contexts are answered from."""
    with connect(tmp_path) as db:
        put(db, [1, 2, 3], "doc")
    with sqlite3.connect(tmp_path / "catalog.db") as file:
        ((page, size),) = file.execute(
            "SELECT rootpage, page_size FROM sqlite_schema, pragma_page_size WHERE name = 'sqlite_autoindex_life_1'"
        )
    file.close()
    content = bytearray((tmp_path / "catalog.db").read_bytes())
    content[(page - 1) * size] = 0xFF  # no kind of page
    (tmp_path / "catalog.db").write_bytes(content)
    with connect(tmp_path) as db:
        assert holds(db, [1, 2, 3])
    assert "how contexts were used cannot be written" in caplog.text
    with connect(tmp_path) as db:  # and it is unlocked
        assert holds(db, [1, 2, 3])
