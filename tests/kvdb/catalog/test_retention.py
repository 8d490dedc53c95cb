"""How a context is to be kept is said when it is stored: it is never there without that, and it is the same after a restart."""

import json
import math
import sqlite3
import time
from contextlib import closing

import numpy as np
import pytest

import kvdb
from kvdb.config import ServerConfig
from kvdb.database import Database
from kvdb.errors import InvalidArgument, NotFound
from kvdb.server.serve import Server
from tests.stores import SPEC, config, connect, kv_of, names
from tests.waiting import until

DOC = np.arange(60)
NOTED = {"source": "wiki", "pages": [1, 2]}
KEPT = {"ttl": 1000, "metadata": NOTED, "pinned": True}


class Seen:
    """What is known of contexts at the moment at which they become visible, in memory and in the store's file."""

    def __init__(self, engine, path):
        self.lives, self.rows = {}, {}
        self._file = path / "catalog.db"
        self._was = engine._catalog.watcher
        engine._catalog.watcher = self

    def came(self, context):
        life = context.life
        self.lives[context.name] = life.pinned, life.expires, dict(life.metadata)
        with closing(sqlite3.connect(self._file)) as db:
            found = db.execute("SELECT pinned, expires, metadata FROM life WHERE name = ?", (context.name,)).fetchone()
        self.rows[context.name] = bool(found[0]), found[1], json.loads(found[2])
        self._was.came(context)

    def used(self, contexts, views):
        self._was.used(contexts, views)

    def went(self, context):
        self._was.went(context)


@pytest.fixture(params=["embedded", "remote"])
def opened(request, tmp_path):
    """A client of a store, and what was seen of its contexts."""
    if request.param == "embedded":
        with connect(tmp_path) as db:
            yield db, Seen(db._transport, tmp_path)
        return
    with Database(config(path=str(tmp_path))) as engine:
        server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
        server.start()
        try:
            with kvdb.connect(server.target) as db:
                yield db, Seen(engine, tmp_path)
        finally:
            server.stop(grace=0)


def test_a_context_is_never_there_without_how_it_is_kept(opened):
    db, seen = opened
    before = time.time()
    db.import_context(SPEC, DOC, kv_of(DOC), name="doc", **KEPT)
    db.import_chunk(SPEC, DOC, kv_of(DOC), name="chunk", **KEPT)
    db.name_chunk(SPEC, DOC, name="twin", **KEPT)
    with db.create_session(SPEC, DOC) as session:
        db.store(session, name="session", **KEPT)
        session.store("again", **KEPT)
    assert seen.lives.keys() == {"doc", "chunk", "twin", "session", "again"}
    assert seen.lives == seen.rows
    for pinned, expires, metadata in seen.lives.values():
        assert (pinned, metadata) == (True, NOTED)
        assert 999 < expires - before < 1010
    for name in seen.lives:
        info = db.get(name).info
        assert (info.pinned, info.expires, info.metadata) == seen.lives[name]


def test_what_is_not_said_is_not_set(opened):
    db, seen = opened
    db.import_context(SPEC, DOC, kv_of(DOC), name="doc", ttl=math.inf, metadata=None)
    assert seen.rows == seen.lives == {"doc": (False, None, {})}


def test_it_is_the_same_after_a_restart(tmp_path):
    with connect(tmp_path) as db:
        db.import_context(SPEC, DOC, kv_of(DOC), name="doc", **KEPT)
        db.import_context(SPEC, DOC + 1, kv_of(DOC + 1), name="late", durability="memory", **KEPT)
        was = [(one.name, one.info.pinned, one.info.expires, one.info.metadata) for one in db.contexts()]
    with connect(tmp_path) as db:
        assert [(one.name, one.info.pinned, one.info.expires, one.info.metadata) for one in db.contexts()] == was


def test_a_context_whose_time_is_over_is_gone(opened):
    db, _ = opened
    db.import_context(SPEC, DOC, kv_of(DOC), name="brief", ttl=0.01)
    until(lambda: names(db) == [])
    with pytest.raises(NotFound):
        db.get("brief")


WRONG = [
    ({"ttl": 0}, "ttl is 0"),
    ({"ttl": math.nan}, "ttl is"),
    ({"metadata": [1]}, "metadata is"),
    ({"pinned": "yes"}, "pinned is"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_what_cannot_be_is_refused_before_anything_is_stored(opened, wrong, words):
    db, seen = opened
    with pytest.raises(InvalidArgument, match=words):
        db.import_context(SPEC, DOC, kv_of(DOC), name="doc", **wrong)
    with db.create_session(SPEC, DOC) as session, pytest.raises(InvalidArgument, match=words):
        session.store("doc", **wrong)
    assert not seen.lives
