"""What is no store, or not for this kvdb, or not for this process, is refused by a typed error, and nothing of it is changed."""

import errno
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from kvdb.errors import CapacityError, IntegrityError, InvalidArgument, Unavailable, Unsupported
from tests.stores import SPEC, connect, holds, kv_of, names, put

DOC = np.arange(60)
LOCKS = {"lock", "catalog.db-shm", "catalog.db-wal"}
"""Files that say who has the store open, and nothing of what is in it."""

OPEN = """
import sys, kvdb
try:
    kvdb.connect(sys.argv[1])
except kvdb.KvdbError as error:
    print(type(error).__name__, error)
"""


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kept(folder):
    return {name: content for name, content in contents(folder).items() if name not in LOCKS}


@pytest.fixture
def store(tmp_path):
    with connect(tmp_path / "store") as db:
        put(db, DOC, "doc")
    return tmp_path / "store"


@pytest.mark.needs_folder
def test_a_full_disk_is_told_by_the_setting_of_the_store(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with connect(tmp_path) as db:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            CapacityError, match=r"No space left .* [\d,]+ bytes free on its file system; .* storage\.path "
        ) as told:
            put(db, DOC, "doc")
        assert "disk_bytes_max" not in str(told.value)


def say_newer(folder):
    label = json.loads((folder / "store.json").read_bytes())
    (folder / "store.json").write_text(json.dumps({**label, "version": 5}))


def say_newer_in_catalogue(folder):
    with closing(sqlite3.connect(folder / "catalog.db")) as db:
        db.execute("PRAGMA user_version = 5")


def lose_catalogue(folder):
    (folder / "catalog.db").unlink()


def empty_catalogue(folder):
    (folder / "catalog.db").write_bytes(b"")


def garble_catalogue(folder):
    (folder / "catalog.db").write_bytes(b"years of work" * 1000)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (say_newer, Unsupported, "has version 5; this kvdb reads versions 1 to 4: .*, so upgrade kvdb"),
        (say_newer_in_catalogue, Unsupported, "has version 5; this kvdb reads versions 1 to 4: .*, so upgrade kvdb"),
        (lose_catalogue, IntegrityError, "is gone, and .* is not empty; nothing of the store was touched"),
        (empty_catalogue, IntegrityError, "is gone, and .* is not empty; nothing of the store was touched"),
        (garble_catalogue, IntegrityError, "nothing of it was touched"),
    ],
)
def test_a_store_that_cannot_be_read_is_left_as_it_is(store, change, error, told):
    change(store)
    before = kept(store)
    for _ in range(2):
        with pytest.raises(error, match=told):
            connect(store)
    assert kept(store) == before


def test_a_store_is_open_in_one_process(store):
    with connect(store) as db:
        script = (
            "import sys, kvdb\ntry: kvdb.connect(sys.argv[1])\nexcept kvdb.KvdbError as error: print(type(error).__name__, error)"
        )
        other = subprocess.run([sys.executable, "-c", script, store], capture_output=True, text=True, timeout=60, check=True)
        assert other.stdout.startswith("Unavailable ")
        assert f"is open already, in process {os.getpid()}; close it there first" in other.stdout
        with pytest.raises(Unavailable, match="in this very process"):
            connect(store)
        assert holds(db, DOC)
    with connect(store) as db:
        assert holds(db, DOC)


def test_a_folder_of_something_else_is_no_store(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidArgument, match="is no kvdb store, and not empty"):
        connect(tmp_path)
    with pytest.raises(Unavailable, match="expected a folder"):
        connect(tmp_path / "thesis.txt")
    assert contents(tmp_path) == {"thesis.txt": b"years of work"}


@pytest.mark.parametrize("quota", ["cpu_bytes_max", "disk_bytes_max"])
def test_a_quota_below_one_block_stores_nothing(quota, tmp_path):
    with connect(tmp_path, **{quota: 100}) as db:
        with pytest.raises(CapacityError, match=f"{quota}=100"):
            put(db, DOC, "doc")
        assert names(db) == []
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        assert holds(db, DOC)


@pytest.mark.parametrize(("folder", "quota"), [(True, "disk_bytes_max"), (False, "cpu_bytes_max")])
def test_nothing_is_let_go_for_what_can_never_fit(folder, quota, tmp_path):
    large = np.arange(40_000) % 64
    with connect(tmp_path if folder else None, **{quota: 2 << 20}) as db:
        for first in range(3):
            put(db, DOC + first, str(first))
        with pytest.raises(CapacityError, match="nothing was let go"):
            db.import_context(SPEC, large, kv_of(large), name="large")
        assert names(db) == ["0", "1", "2"]
        assert holds(db, DOC)
