"""A remote database is closed beside calls of other threads: they answer, or raise that it is closed."""

from contextlib import suppress

import pytest

import kvdb
from kvdb.config import ServerConfig
from kvdb.errors import SessionClosed, Unavailable
from kvdb.server.serve import Server
from tests.racing import race


@pytest.fixture
def server(engine):
    server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
    server.start()
    yield server
    server.stop(grace=0)


def test_sessions_are_opened_while_it_closes(server, engine, spec):
    """None of them stays open on the server."""
    for _ in range(4):
        db = kvdb.connect(server.target)
        kept = [db.create_session(spec, [1]) for _ in range(30)]

        def open_some(db=db, kept=kept):
            with suppress(Unavailable):
                for _ in range(30):
                    kept.append(db.create_session(spec, [1]))
                    kept.append(kept[0].fork())

        def fork_some(kept=kept):
            with suppress(Unavailable, SessionClosed):
                for _ in range(30):
                    kept.append(kept[0].fork())

        race(open_some, fork_some, db.close, db.close, seconds=0)
        with pytest.raises(Unavailable):
            db.contexts()
        for session in kept:
            with pytest.raises(SessionClosed):
                session.stats()


def test_calls_of_every_sort_are_made_while_it_closes(server, engine, spec, make_kv):
    kv = make_kv(spec, 10)
    for number in range(6):
        db = kvdb.connect(server.target)

        def read(db=db):
            with suppress(Unavailable):
                for _ in range(50):
                    db.contexts()

        def write(db=db, number=number):
            with suppress(Unavailable):
                for i in range(50):
                    db.import_context(spec, kv.tokens + 100 * i, kv.pairs(), name=f"{number}-{i}")

        race(read, write, db.close, seconds=0)
