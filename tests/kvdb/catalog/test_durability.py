"""What each durability promises: an orderly end, the end of the process, the loss of power."""

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.config import ServerConfig
from kvdb.errors import CapacityError, ConfigError, InvalidArgument, Unavailable, Unsupported
from kvdb.server.serve import Server
from tests.stores import SPEC, config, connect, holds, kv_of, names

DOC, OTHER = np.arange(300) % 50, np.arange(90) % 31


def put(db, tokens, name, durability=None):
    db.import_context(SPEC, tokens, kv_of(tokens), name=name, durability=durability)


def killed(folder, copy):
    """A copy of a store as a process that is killed now would leave it."""
    shutil.copytree(folder, copy)
    return copy


class Syncs:
    """The names of files that are synced by us (SQLite syncs its own), and the number of syncs that are to fail."""

    def __init__(self, monkeypatch):
        self.names, self.to_fail = [], 0
        fsync = os.fsync

        def noted(file):
            if self.to_fail:
                self.to_fail -= 1
                raise OSError(5, "Input/output error")
            self.names.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
            fsync(file)

        monkeypatch.setattr(os, "fsync", noted)


@pytest.fixture
def syncs(monkeypatch):
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to tell the names of open files")
    return Syncs(monkeypatch)


@pytest.mark.parametrize("durability", ["memory", "os", "durable", None])
def test_every_context_outlives_an_orderly_end(durability, tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc", durability)
        with db.create_session(SPEC, DOC) as session:
            session.store("twin", durability=durability)
        assert holds(db, DOC)
        db._transport.check_integrity()
    with connect(tmp_path) as db:
        assert names(db) == ["doc", "twin"]
        assert holds(db, DOC)


@pytest.mark.parametrize(("durability", "outlives"), [("memory", False), ("os", True), ("durable", True)])
def test_the_end_of_the_process(durability, outlives, tmp_path):
    with connect(tmp_path / "store") as db:
        put(db, DOC, "doc", durability)
        with connect(killed(tmp_path / "store", tmp_path / "left")) as left:
            assert (names(left) == ["doc"]) == outlives
            assert holds(left, DOC) == outlives
            left._transport.check_integrity()


@pytest.mark.needs_folder
def test_what_waits_for_no_disk_is_synced_by_what_does(syncs, tmp_path):
    with connect(tmp_path) as db:
        syncs.names.clear()
        put(db, DOC, "doc", "os")
        put(db, OTHER, "other", "memory")
        assert syncs.names == []
        put(db, np.r_[DOC, 1, 2], "longer", "durable")
        assert sorted(set(syncs.names)) == [".1.segment", "0.segment", "segments"]
        assert syncs.names.index("0.segment") < len(syncs.names) - 1


@pytest.mark.needs_folder
def test_dropping_syncs_what_other_rows_name(syncs, tmp_path):
    """The transaction that drops one context carries the rows of all before it to the disk."""
    with connect(tmp_path) as db:
        put(db, DOC, "doc", "os")
        put(db, OTHER, "other", "os")
        syncs.names.clear()
        db.drop("other")
        assert "0.segment" in syncs.names


@pytest.mark.needs_folder
def test_a_sync_that_failed_is_never_retried_into_a_success(syncs, tmp_path, caplog):
    with caplog.at_level(logging.ERROR, "kvdb"), connect(tmp_path) as db:
        put(db, DOC, "doc", "os")
        syncs.to_fail = 1
        for _ in range(2):
            with pytest.raises(Unavailable, match="0.segment"):
                db.drop("doc")
            with pytest.raises(Unavailable, match="is taken until the store is opened again"):
                put(db, OTHER, "other", "durable")
        assert names(db) == ["doc"]
        assert holds(db, DOC)
        put(db, np.arange(70), "third", "os")
    assert "may be lost" in caplog.text
    with connect(tmp_path) as db:
        put(db, OTHER, "other", "durable")
        assert names(db) == ["doc", "other", "third"]


def test_what_is_in_memory_only_can_be_dropped_and_offloaded(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc", "memory")
        put(db, np.r_[DOC, 1], "longer", "durable")
        put(db, OTHER, "other", "memory")
        assert db.offload("other")
        assert holds(db, OTHER)
        db.drop("doc")
        db.drop("other")
        with pytest.raises(kvdb.errors.NotFound):
            db.get("doc")
        db._transport.check_integrity()
    with connect(tmp_path) as db:
        assert names(db) == ["longer"]
        assert holds(db, np.r_[DOC, 1])


def test_what_cannot_be_written_in_the_end_is_said(tmp_path, caplog):
    with caplog.at_level(logging.ERROR, "kvdb"), connect(tmp_path, disk_bytes_max=5000) as db:
        put(db, DOC, "doc", "memory")
    assert "'doc' is lost" in caplog.text
    with connect(tmp_path) as db:
        assert names(db) == []


def test_the_configuration_says_what_nobody_asks_for(tmp_path):
    with connect(tmp_path / "store", durability="memory") as db:
        put(db, DOC, "doc")
        put(db, OTHER, "other", "durable")
        with connect(killed(tmp_path / "store", tmp_path / "left")) as left:
            assert names(left) == ["other"]
    with pytest.raises(ConfigError, match="storage.durability is 'always'"):
        config(durability="always")


def test_a_database_without_a_store_promises_nothing(engine):
    db = Client(engine)
    put(db, DOC, "doc", "memory")
    for durability in ("os", "durable"):
        with pytest.raises(Unsupported, match="needs a store"):
            put(db, OTHER, "other", durability)
        with pytest.raises(Unsupported, match="needs a store"), db.create_session(SPEC, DOC) as session:
            session.store("twin", durability=durability)
    assert names(db) == ["doc"]


@pytest.mark.parametrize("wrong", ["", "DURABLE", 1, True, b"os"])
def test_another_durability_is_refused(db, wrong):
    with pytest.raises(InvalidArgument, match="expected one of 'memory', 'os', 'durable'"):
        put(db, DOC, "doc", wrong)
    with db.create_session(SPEC, []) as session, pytest.raises(InvalidArgument, match="expected one of 'memory'"):
        db.store(session, name="doc", durability=wrong)


def test_a_server_is_asked_for_it_too(tmp_path):
    with connect(tmp_path / "store") as embedded:
        server = Server(embedded._transport, ServerConfig(host="127.0.0.1", port=0))
        server.start()
        try:
            with kvdb.connect(server.target) as db:
                put(db, DOC, "doc", "memory")
                put(db, OTHER, "other")
                with db.create_session(SPEC, DOC) as session:
                    session.store("twin", durability="memory")
            with connect(killed(tmp_path / "store", tmp_path / "left")) as left:
                assert names(left) == ["other"]
        finally:
            server.stop(grace=0)


def test_a_full_budget_refuses_what_is_written_at_once(tmp_path):
    with connect(tmp_path, disk_bytes_max=5000) as db:
        with pytest.raises(CapacityError):
            put(db, DOC, "doc", "os")
        assert names(db) == []
