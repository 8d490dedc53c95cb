"""What a client asks again by itself where its server is unavailable, and how it goes on when that has come back."""

import time

import numpy as np
import pytest

import kvdb
from kvdb import errors
from kvdb.database import Database
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.options import REPEATED
from tests.waiting import until

CHANGING = {"attend", "create_session"}


def ones(*shape):
    return np.ones((*shape, 16), np.float32)


@pytest.fixture
def failing(monkeypatch):
    """`failing(name)`: the database's method is unavailable the first time; the list that is returned has an entry a call."""

    def fail(name):
        calls, method = [], getattr(Database, name)

        def once(*arguments, **named):
            calls.append(arguments)
            if len(calls) == 1:
                raise errors.Unavailable("the disk is away for a moment")
            return method(*arguments, **named)

        monkeypatch.setattr(Database, name, once)
        return calls

    return fail


def test_a_call_that_changes_nothing_is_made_again(client, failing):
    calls = failing("contexts")
    assert client.contexts() == []
    assert len(calls) == 2


@pytest.mark.parametrize("name", sorted(CHANGING))
def test_a_call_that_changes_something_is_not(client, spec, failing, name):
    with client.create_session(spec, [1]) as session:
        made = {
            "create_session": lambda: client.create_session(spec, [1]),
            "attend": lambda: client.attend([session], 0, ones(1, 4, 1), ones(1, 2, 1), ones(1, 2, 1)),
        }
        calls = failing(name)
        with pytest.raises(errors.Unavailable, match="the disk is away"):
            made[name]()
        assert len(calls) == 1


def test_nothing_that_appends_or_makes_is_repeated():
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["Kvdb"].methods}
    assert set(REPEATED) <= methods
    appending = {"Update", "Attend", "AttendTogether", "CreateSession", "Fork", "Store", "ImportContext", "Decode"}
    changing = appending | {"Backup", "UnknownFiles"}
    assert not changing & set(REPEATED)


def test_a_client_goes_on_after_its_server_was_killed(process, spec, make_kv, tmp_path):
    kv = make_kv(spec, 60)
    with process("--store", str(tmp_path)) as (running, line):
        target = line.split()[-1]
        db = kvdb.connect(target)
        db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        session = db.create_session(spec, kv.tokens)
        session.attend(0, *(array[:, :1] for array in (kv.q[0], *kv.pairs()[0])))
        running.kill()
        running.wait()
    began = time.monotonic()
    with pytest.raises(errors.Unavailable):
        session.attend(0, *(array[:, :1] for array in (kv.q[0], *kv.pairs()[0])))
    assert time.monotonic() - began < 5
    with process("--store", str(tmp_path), "--port", target.rpartition(":")[2]):
        until(lambda: is_there(db))
        with db.create_session(spec, kv.tokens) as again:
            assert again.reused == session.reused
            k, v = again.read(1, 0, again.reused)
            np.testing.assert_array_equal(k, kv.k[1][:, : again.reused])
            np.testing.assert_array_equal(v, kv.v[1][:, : again.reused])
            again.attend(0, *(array[:, -1:] for array in (kv.q[0], *kv.pairs()[0])))
        with pytest.raises(errors.SessionClosed):
            session.attend(0, *(array[:, :1] for array in (kv.q[0], *kv.pairs()[0])))
        db.close()


def is_there(db):
    """Whether the context is found."""
    try:
        return [context.name for context in db.contexts()] == ["doc"]
    except errors.Unavailable:
        return False
