"""Two processes never write to one store; where they do all the same, nothing acknowledged is lost or taken for another."""

import fcntl
import os
import shutil

import numpy as np
import pytest

from kvdb.errors import IntegrityError, Unavailable
from tests.stores import SPEC, connect, holds, kv_of, names, put

DOC, OTHER = np.arange(300) % 50, np.arange(300) % 47


def test_removing_the_lock_file_unlocks_no_store(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        (tmp_path / "lock").unlink()
        with pytest.raises(Unavailable, match="is open already, in process unknown"):
            connect(tmp_path)
        put(db, OTHER, "other")
    with connect(tmp_path) as db:
        assert names(db) == ["doc", "other"]
        assert holds(db, DOC)
        assert holds(db, OTHER)


@pytest.fixture
def no_locks(monkeypatch, integrity_watch):
    """A file system that lets everybody lock everything. `no_locks(db)`: this one is not to know of files that another writes."""
    monkeypatch.setattr(fcntl, "flock", lambda _file, _how: None)
    return lambda db: integrity_watch.spare(db._transport)


def test_a_second_writer_makes_the_first_fail(no_locks, tmp_path):
    with connect(tmp_path) as first:
        no_locks(first)
        put(first, DOC, "doc")
        with connect(tmp_path) as second:
            for call in (lambda: put(first, OTHER, "lost"), lambda: first.drop("doc"), lambda: first.pin("doc")):
                with pytest.raises(Unavailable, match="another process opened the store while this one had it open"):
                    call()
            assert holds(first, DOC)
            put(second, OTHER, "second")
            assert holds(second, OTHER)
    with connect(tmp_path) as db:
        assert names(db) == ["doc", "second"]
        assert holds(db, DOC)
        assert holds(db, OTHER)


@pytest.mark.needs_folder
def test_no_file_of_another_writer_is_written_over(no_locks, tmp_path):
    with connect(tmp_path) as first, connect(tmp_path) as second:
        no_locks(first)
        put(second, OTHER, "second")
        before = (tmp_path / "segments" / "0.segment").read_bytes()
        with pytest.raises(Unavailable):
            put(first, DOC, "lost")
        assert (tmp_path / "segments" / "0.segment").read_bytes() == before
        second._transport.check_integrity()
        assert holds(second, OTHER)


def test_a_catalogue_that_is_replaced_while_it_is_open_takes_nothing_more(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        shutil.copy(tmp_path / "catalog.db", tmp_path / "copy")
        os.replace(tmp_path / "copy", tmp_path / "catalog.db")
        for name in ("one", "two"):
            with pytest.raises(Unavailable, match="was removed or replaced while it was open"):
                put(db, OTHER, name)
        assert holds(db, DOC)


def store_blend(db, tokens):
    put(db, tokens, "doc")
    with db.create_session(SPEC, parts=["doc"]) as session:
        for layer, (k, v) in enumerate(kv_of(tokens[::-1][:40])):
            session.overlay(layer, np.arange(40), k, v)
        session.store("blend")


@pytest.mark.needs_folder
@pytest.mark.parametrize("number", [0, 1])
def test_another_segment_of_the_same_name_is_never_answered_from(number, tmp_path):
    """Its checksums are right, and its head is that of a file of this store, this number and this length."""
    connect(tmp_path / "store").close()
    shutil.copytree(tmp_path / "store", tmp_path / "twin")
    for folder, tokens in (("store", DOC), ("twin", OTHER)):
        with connect(tmp_path / folder) as db:
            store_blend(db, tokens)
    shutil.copy(tmp_path / "twin" / "segments" / f"{number}.segment", tmp_path / "store" / "segments")
    with connect(tmp_path / "store") as db:
        with pytest.raises(IntegrityError, match="holds another segment than the catalogue says"):
            db.verify("blend")
        with pytest.raises(IntegrityError), db.create_session(SPEC, parts=["blend"]) as session:
            session.attention(0, np.ones((2, 1, 16), np.float32), positions=[session.start - 1])
