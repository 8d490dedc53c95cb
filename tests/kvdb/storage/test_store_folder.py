"""The folder of a store: one process at a time, and nothing is written to what is no store."""

import json
import os
import subprocess
import sys

import pytest

from kvdb.errors import IntegrityError, InvalidArgument, Unavailable, Unsupported
from kvdb.storage.store_folder import LABEL, LOCK, SEGMENTS, StoreFolder


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_store_is_the_same_when_it_is_opened_again(tmp_path):
    first = StoreFolder(tmp_path / "new" / "store")
    assert first.path == tmp_path / "new" / "store" / SEGMENTS
    assert first.path.is_dir()
    first.close()
    first.close()
    again = StoreFolder(tmp_path / "new" / "store")
    assert again.key == first.key
    again.close()
    other = StoreFolder(tmp_path / "other")
    assert other.key != first.key
    other.close()


def test_only_the_owner_may_read_a_store(tmp_path):
    StoreFolder(tmp_path / "store").close()
    assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "store").rglob("*"))


def test_a_store_is_open_in_one_place_at_a_time(tmp_path):
    folder = StoreFolder(tmp_path)
    with pytest.raises(Unavailable, match=r"is open already, in this very process; .*db\.close\(\)"):
        StoreFolder(tmp_path)
    script = (
        "import sys; from pathlib import Path; from kvdb.storage.store_folder import StoreFolder; StoreFolder(Path(sys.argv[1]))"
    )
    other = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert f"is open already, in process {os.getpid()}" in other.stderr
    assert other.returncode
    folder.close()
    StoreFolder(tmp_path).close()


def test_a_folder_that_is_no_store_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidArgument, match="is no kvdb store, and not empty"):
        StoreFolder(tmp_path)
    assert contents(tmp_path) == {(tmp_path / "thesis.txt").relative_to(tmp_path): b"years of work"}


@pytest.mark.parametrize(
    ("label", "error", "told"),
    [
        (
            json.dumps({"format": "kvdb store", "version": 5, "id": "0"}),
            Unsupported,
            "has version 5; this kvdb reads versions 1 to 4: .*, so upgrade kvdb",
        ),
        (json.dumps({"format": "another", "version": 1, "id": "0"}), InvalidArgument, "says 'another'"),
        (json.dumps({"format": "kvdb store", "version": 1, "id": 0}), InvalidArgument, "is no kvdb store"),
        ("{", IntegrityError, "cannot be read"),
        ("[]", IntegrityError, "cannot be read"),
        ("{}", IntegrityError, "cannot be read"),
    ],
)
def test_a_label_that_is_not_known_is_refused(tmp_path, label, error, told):
    (tmp_path / LABEL).write_text(label)
    for _ in range(2):  # refusing it leaves no lock behind
        with pytest.raises(error, match=told):
            StoreFolder(tmp_path)
    assert set(contents(tmp_path)) == {(tmp_path / name).relative_to(tmp_path) for name in (LABEL, LOCK)}


def test_what_a_killed_process_left_while_it_made_a_store_is_taken_over(tmp_path):
    (tmp_path / f".{LABEL}").write_text('{"format": ')
    (tmp_path / LOCK).write_text("12345\n")
    StoreFolder(tmp_path).close()
    assert json.loads((tmp_path / LABEL).read_bytes())["version"] == 4


def test_a_path_that_cannot_be_a_folder_is_told(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable, match="cannot be used: "):
        StoreFolder(tmp_path / "file")
