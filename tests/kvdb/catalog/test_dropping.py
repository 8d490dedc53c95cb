"""Many contexts are dropped by one call, which is one transaction: all that are named or none, or those that match."""

import numpy as np
import pytest

import kvdb
from kvdb.config import ServerConfig
from kvdb.database import Database
from kvdb.errors import InvalidArgument, NotFound
from kvdb.server.serve import Server
from tests.stores import SPEC, config, connect, holds, names, put

DOC = np.arange(60)
NAMES = ["a/1", "a/2", "a/3", "b/1"]


class Opened:
    """A client of a store with four contexts, two of which are noted to be old; and what was committed since."""

    def __init__(self, db, engine):
        self.db, self.engine = db, engine
        for number, name in enumerate(NAMES):
            put(db, np.r_[DOC[:30], 40 + number], name, metadata={"age": "old"} if number in {0, 3} else {"age": "new"})
        self._statements = []
        engine._catalog._file._db.connection.set_trace_callback(self._statements.append)

    @property
    def commits(self):
        return self._statements.count("COMMIT")


@pytest.fixture(params=["embedded", "remote"])
def opened(request, tmp_path):
    if request.param == "embedded":
        with connect(tmp_path) as db:
            yield Opened(db, db._transport)
        return
    with Database(config(path=str(tmp_path))) as engine:
        server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
        server.start()
        try:
            with kvdb.connect(server.target) as db:
                yield Opened(db, engine)
        finally:
            server.stop(grace=0)
        engine.check_integrity()


def test_contexts_that_are_named_go_by_one_transaction(opened):
    opened.db.drop("a/1", "b/1", "a/1")
    assert names(opened.db) == ["a/2", "a/3"]
    assert opened.commits == 1


def test_none_goes_where_one_is_not_there(opened):
    with pytest.raises(NotFound, match="gone"):
        opened.db.drop("a/1", "gone", "b/1")
    assert names(opened.db) == NAMES
    assert not opened.commits
    assert holds(opened.db, np.r_[DOC[:30], 40])


def test_contexts_that_match_go_by_one_transaction(opened):
    done = opened.db.drop_all("a/", metadata={"age": "new"})
    assert (done.names, done.in_use) == (("a/2", "a/3"), ())
    assert names(opened.db) == ["a/1", "b/1"]
    assert opened.commits == 1
    assert opened.db.drop_all(metadata={"age": "old"}).names == ("a/1", "b/1")
    assert names(opened.db) == []
    assert opened.db.drop_all("a/").names == ()


def test_what_a_session_stands_on_stays_and_is_named(opened):
    with opened.db.create_session(SPEC, np.r_[DOC[:30], 41]) as session:
        assert session.reused == 31
        done = opened.db.drop_all("a/")
        assert (done.names, done.in_use) == (("a/1", "a/3"), ("a/2",))
        assert names(opened.db) == ["a/2", "b/1"]
        opened.db.drop("a/2")  # by its name it goes, and the session goes on
        assert session.reused == 31
    assert opened.db.drop_all("a/").names == ()


def test_everything_does_not_go_by_mistake(opened):
    with pytest.raises(InvalidArgument, match="everything"):
        opened.db.drop_all()
    opened.db.drop()
    assert names(opened.db) == NAMES


def test_they_are_gone_after_a_restart(tmp_path):
    with connect(tmp_path) as db:
        Opened(db, db._transport)
        put(db, DOC, "a/memory", "memory")
        db.drop_all("a/")
    with connect(tmp_path) as db:
        assert names(db) == ["b/1"]
        assert db.verify_store() == []
