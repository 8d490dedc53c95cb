"""Opening a store removes no file that may be somebody's: what its catalogue does not know stays, and goes by `kvdb gc`."""

import json
import logging
import os
import shutil

import numpy as np
import pytest

from kvdb.__main__ import main
from kvdb.catalog.durable.catalog_file import CatalogFile
from kvdb.errors import CapacityError, IntegrityError
from kvdb.types import UnknownFile
from tests.kvdb.catalog.test_stored_catalog import damage
from tests.kvdb.storage.blocks import folder
from tests.stores import connect, holds, names, put

DOC, THIRD = np.arange(300) % 50, np.arange(20, 110) % 60
OTHER = DOC[::-1]


def lay(catalogue, folder):
    """Put a copy of a catalogue in the place of a store's."""
    for path in folder.glob("catalog.db*"):
        path.unlink()
    shutil.copy(catalogue, folder / "catalog.db")


@pytest.fixture
def restored(tmp_path):
    """A store with the older one of its catalogues, which does not know `other`; the newer one lies beside it as `newer.db`."""
    store = tmp_path / "store"
    with connect(store) as db:
        put(db, DOC, "doc", pinned=True)
        db.backup(tmp_path / "backup")  # a copy that was made while the store was open
        put(db, OTHER, "other")
    shutil.copy(store / "catalog.db", tmp_path / "newer.db")
    lay(tmp_path / "backup" / "catalog.db", store)
    return store


@pytest.mark.needs_folder
def test_an_older_catalogue_removes_no_newer_segment(restored, tmp_path, caplog):
    for _ in range(3):
        with caplog.at_level(logging.WARNING), connect(restored) as db:
            assert names(db) == ["doc"]
            assert db.unknown_files() == [UnknownFile("1.segment", (restored / "segments" / "1.segment").stat().st_size)]
            db._transport.check_integrity()
    assert "1 files, " in caplog.text
    assert "put the newer one back, else kvdb gc removes them" in caplog.text
    lay(tmp_path / "newer.db", restored)
    with connect(restored) as db:
        assert names(db) == ["doc", "other"]
        assert holds(db, OTHER)
        assert db.unknown_files() == []


def test_a_newer_segment_is_not_written_over_either(restored, tmp_path):
    with connect(restored) as db:
        put(db, THIRD, "third")
    lay(tmp_path / "newer.db", restored)
    with connect(restored) as db:
        assert holds(db, OTHER)
        assert [file.name for file in db.unknown_files()] == ["2.segment"]  # of the third, which this catalogue does not know


@pytest.mark.needs_folder
def test_a_newer_segment_takes_room_until_gc_removes_it(restored, capsys):
    with connect(restored, disk_bytes_max=220_000) as db, pytest.raises(CapacityError, match="disk_bytes_max"):
        put(db, OTHER, "other")
    assert main(["verify", "--server", str(restored)]) == 0
    assert "1.segment: 86,016 bytes that the catalogue does not know; kvdb adopt or kvdb gc decides" in capsys.readouterr().out
    assert main(["gc", "--dry-run", "--server", str(restored)]) == 0
    assert (restored / "segments" / "1.segment").exists()
    assert main(["gc", "--json", "--server", str(restored)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "1.segment, 86,016 bytes, would be removed"
    assert json.loads(said[1]) == {"name": "1.segment", "nbytes": 86016}
    assert not (restored / "segments" / "1.segment").exists()
    assert main(["gc", "--server", str(restored)]) == 0
    assert capsys.readouterr().out == "the catalogue knows every file\n"


def test_a_newer_catalogue_gives_its_contexts_to_the_older(restored, tmp_path, capsys):
    with connect(restored) as db:
        put(db, THIRD, "third")  # neither catalogue alone knows all three
    for said in ("'other' was taken in\n", "the store has every context of that catalogue\n"):
        assert main(["adopt", str(tmp_path / "newer.db"), "--store", str(restored)]) == 0
        assert capsys.readouterr().out == said
    with connect(restored) as db:
        assert sorted(names(db)) == ["doc", "other", "third"]
        assert holds(db, OTHER)
        assert holds(db, THIRD)
        assert db.unknown_files() == []
        db._transport.check_integrity()


@pytest.mark.needs_folder
def test_what_cannot_be_taken_in_is_said_and_left(restored, tmp_path, capsys):
    with connect(restored):
        assert main(["adopt", str(tmp_path / "newer.db"), "--store", str(restored)]) == 4  # the store is open
    (restored / "segments" / "1.segment").unlink()
    assert main(["adopt", str(tmp_path / "newer.db"), "--store", str(restored)]) == 0
    assert capsys.readouterr().out == "'other' was left: its file 1.segment is gone\n"
    assert main(["adopt", str(tmp_path / "none.db"), "--store", str(restored)]) == 3
    assert main(["adopt", str(tmp_path / "newer.db"), "--store", str(tmp_path / "none")]) == 3
    assert not (tmp_path / "none").exists()


@pytest.mark.needs_folder
def test_a_file_of_other_content_is_not_taken_for_an_adopted_one(restored, tmp_path):
    shutil.copy(restored / "segments" / "0.segment", restored / "segments" / "1.segment")
    assert main(["adopt", str(tmp_path / "newer.db"), "--store", str(restored)]) == 0
    with connect(restored) as db, pytest.raises(IntegrityError):
        db.get("other").read(0, 0, 10)


def test_room_that_gc_gives_back_can_be_used(restored):
    with connect(restored, disk_bytes_max=220_000) as db:
        db.unknown_files(remove=True)
        put(db, OTHER, "other")
        db._transport.check_integrity()


@pytest.fixture
def around(tmp_path, monkeypatch):
    """`around(call, before)`: a copy of the store is made before that transaction of its catalogue, or behind it, as a process
    that is killed then would leave it. Returns the folder of the copy."""

    def watch(call, *, before):
        carried_out = getattr(CatalogFile, call)

        def watched(self, *given, **named):
            if before:
                shutil.copytree(tmp_path / "store", tmp_path / "left")
            carried_out(self, *given, **named)
            if not before:
                shutil.copytree(tmp_path / "store", tmp_path / "left")

        monkeypatch.setattr(CatalogFile, call, watched)
        return tmp_path / "left"

    return watch


@pytest.mark.needs_folder
@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="files cannot be marked here")
@pytest.mark.parametrize(
    ("call", "before", "stored"),
    [("insert", True, ["doc"]), ("insert", False, ["doc", "other"]), ("delete", True, ["doc"]), ("delete", False, [])],
)
def test_a_kill_around_a_transaction_leaves_no_file(around, call, before, stored, tmp_path):
    with connect(tmp_path / "store") as db:
        put(db, DOC, "doc")
        left = around(call, before=before)
        if call == "insert":
            put(db, OTHER, "other")
        else:
            db.drop("doc")
    with connect(left) as db:
        assert (names(db), db.unknown_files()) == (stored, [])
        assert len(list(left.glob("segments/*"))) == len(stored)
    store = folder(tmp_path / "store" / "segments")
    assert not any(store.marked(key) for key in store.list())


def test_a_file_is_kept_that_was_marked_after_the_catalogue_was_copied(around, tmp_path):
    """The process died between the file and its row, and then an older catalogue came."""
    with connect(tmp_path / "store") as db:
        put(db, DOC, "doc")
        db.backup(tmp_path / "backup")
        put(db, THIRD, "third")
        left = around("insert", before=True)
        put(db, OTHER, "other")
    lay(tmp_path / "backup" / "catalog.db", left)
    for _ in range(2):
        with connect(left) as db:
            assert [file.name for file in db.unknown_files()] == ["1.segment", "2.segment"]


@pytest.mark.needs_folder
def test_what_is_in_memory_only_leaves_no_file(tmp_path):
    """Its segment has one, because it was offloaded, and no row."""
    with connect(tmp_path / "store") as db:
        put(db, DOC, "doc")
        put(db, OTHER, "other", "memory")
        db.offload("other")
        shutil.copytree(tmp_path / "store", tmp_path / "left")
    with connect(tmp_path / "left") as db:
        assert (names(db), db.unknown_files()) == (["doc"], [])
    with connect(tmp_path / "store") as db:
        assert holds(db, OTHER)


@pytest.mark.needs_folder
def test_what_lies_beside_a_segment_shares_its_fate(restored):
    (restored / "segments" / "1.flat.0.index").write_bytes(b"of an unknown segment")
    (restored / "segments" / "7.flat.0.index").write_bytes(b"of none at all")
    (restored / "segments" / ".8.segment").write_bytes(b"never finished")
    with connect(restored) as db:
        assert [file.name for file in db.unknown_files()] == ["1.flat.0.index", "1.segment"]
    assert not (restored / "segments" / "7.flat.0.index").exists()
    assert not (restored / "segments" / ".8.segment").exists()


@pytest.mark.needs_folder
def test_nothing_is_removed_of_a_store_that_was_damaged(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        put(db, OTHER, "other")
    damage(tmp_path, "UPDATE context SET length = 299 WHERE name = 'doc'")
    with connect(tmp_path) as db:
        assert [file.name for file in db.unknown_files()] == ["0.segment"]
        with pytest.raises(IntegrityError, match="its files may be of contexts that are not known"):
            db.unknown_files(remove=True)
    assert len(list(tmp_path.glob("segments/*"))) == 2
