"""What lies on disk goes with the database that wrote it, however that ends, and never takes more than it may."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from kvdb.errors import CapacityError, IntegrityError, Unavailable
from kvdb.storage.disk import DiskTier
from kvdb.storage.segment_folder import SegmentFolder
from kvdb.storage.temporary_folder import MARKER, TemporaryFolder
from tests.kvdb.storage.blocks import CRUMBS, PAGES, Stored
from tests.racing import race


@pytest.fixture
def stored():
    stored = Stored(PAGES)
    yield stored
    stored.close()


def write(folder, stored):
    return folder.write("digest", stored.tokens, stored.tables)


def test_files_are_counted_by_the_size_of_their_blocks_and_go_when_removed(tmp_path, stored):
    folder, crumbs = DiskTier(SegmentFolder(TemporaryFolder(tmp_path / "new" / "folder")), None), Stored(CRUMBS)
    files = [write(folder, stored), write(folder, stored), write(folder, crumbs)]
    folder.check_integrity(files)
    small, large = folder.stats()
    assert (small.name, small.block_nbytes, small.blocks_used) == ("disk", CRUMBS.nbytes, 3 * 17)
    assert (large.blocks_used, large.blocks_total, large.nbytes) == (2 * 3 * 4, 2 * 3 * 4, 2 * files[0].nbytes)
    assert folder.nbytes == small.nbytes + large.nbytes
    for file in files:
        folder.remove(file)
        folder.remove(file)
    assert (folder.nbytes, folder.stats()) == (0, [])
    folder.check_integrity([])
    folder.close()
    crumbs.close()


def test_what_is_kept_beside_a_file_is_counted_and_goes_with_it(tmp_path, stored):
    folder = DiskTier(SegmentFolder(TemporaryFolder(tmp_path)), stored.contents("x" * 30).nbytes + 100)
    file = write(folder, stored)
    assert folder.read_beside(file, ".evidence") is None
    for content in (b"a" * 100, b"b" * 60):
        folder.write_beside(file, ".evidence", content)
        assert folder.read_beside(file, ".evidence") == content
        assert folder.nbytes == file.nbytes + len(content) == folder.stats()[0].nbytes
        folder.check_integrity([file])
    with pytest.raises(CapacityError, match="the disk tier needs 101 bytes more"):
        folder.write_beside(file, ".evidence", b"c" * 101)
    assert (folder.read_beside(file, ".evidence"), folder.nbytes) == (None, file.nbytes)
    folder.write_beside(file, ".evidence", b"d")
    next(folder.store.path.glob("*.evidence")).write_bytes(b"")
    with pytest.raises(IntegrityError, match="that are not the 2 that were written"):
        folder.check_integrity([file])
    folder.remove(file)
    assert (folder.nbytes, [path.name for path in folder.store.path.iterdir()]) == (0, ["lock"])
    with pytest.raises(Unavailable, match="was removed"):
        folder.write_beside(file, ".evidence", b"e")
    file = write(folder, stored)
    folder.write_beside(file, ".evidence", b"f")
    folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_spent_budget_is_a_typed_error_and_writes_nothing(tmp_path, stored):
    nbytes = stored.contents("x" * 30).nbytes
    folder = DiskTier(SegmentFolder(TemporaryFolder(tmp_path)), 2 * nbytes)
    first, second = write(folder, stored), write(folder, stored)
    with pytest.raises(CapacityError, match=f"storage.disk_bytes_max={2 * nbytes}; drop contexts"):
        write(folder, stored)
    folder.check_integrity([first, second])
    folder.remove(first)
    write(folder, stored)
    folder.close()


def test_a_write_that_fails_takes_nothing_of_the_budget(tmp_path, stored, monkeypatch):
    folder = DiskTier(SegmentFolder(TemporaryFolder(tmp_path)), None)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match="No space left"):
        write(folder, stored)
    assert folder.nbytes == 0
    folder.check_integrity([])
    folder.close()


def test_files_are_right_at_every_moment_of_their_being_written(tmp_path, stored, monkeypatch):
    """Also where the folder is looked at for as long as a large file takes."""
    folder, looks = DiskTier(SegmentFolder(TemporaryFolder(tmp_path)), None), []

    def look(*_):
        folder.check_integrity([])
        looks.append(len(list(folder.store.path.glob("*.segment"))))

    with monkeypatch.context() as patch:
        for what in ("fsync", "rename"):
            done = getattr(os, what)
            patch.setattr(os, what, lambda *given, done=done: (look(), done(*given), look()))
        write(folder, stored)
    assert looks == [1, 1, 1, 1]
    folder.close()


def test_files_are_looked_at_while_others_come_and_go(tmp_path, stored):
    folder = DiskTier(SegmentFolder(TemporaryFolder(tmp_path)), None)

    def look():
        with suppress(IntegrityError):  # an owner may have left its place, and not yet removed its file
            folder.check_integrity([])

    race(look, look, lambda: folder.remove(write(folder, stored)))
    folder.check_integrity([])
    folder.close()


def test_a_folder_is_closed_while_it_is_looked_at(tmp_path, stored):
    for _ in range(20):
        folder = DiskTier(SegmentFolder(TemporaryFolder(tmp_path)), None)
        files = [write(folder, stored) for _ in range(3)]
        race(lambda folder=folder, files=files: folder.check_integrity(files), folder.close, seconds=0)


def test_files_that_nobody_owns_or_that_are_missing_are_found(tmp_path, stored):
    folder = DiskTier(SegmentFolder(TemporaryFolder(tmp_path)), None)
    file = write(folder, stored)
    with pytest.raises(IntegrityError, match="segments own 0 files, and 1 are known"):
        folder.check_integrity([])
    with pytest.raises(IntegrityError, match="segments own 2 files"):
        folder.check_integrity([file, file])
    (folder.store.path / file.key).unlink()
    with pytest.raises(IntegrityError, match="holds 0 files that are not the 1"):
        folder.check_integrity([file])
    folder.close()


def test_closing_leaves_nothing_behind(tmp_path, stored):
    folder = DiskTier(SegmentFolder(TemporaryFolder(tmp_path)), None)
    write(folder, stored)
    assert folder.store.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


OTHER = """
import sys
from pathlib import Path
from kvdb.storage.disk import DiskTier
from kvdb.storage.segment_folder import SegmentFolder
from kvdb.storage.temporary_folder import MARKER, TemporaryFolder
from tests.kvdb.storage.blocks import Stored
stored = Stored()
folder = DiskTier(SegmentFolder(TemporaryFolder(Path(sys.argv[1]))), None)
folder.write("digest", stored.tokens, stored.tables)
print(folder.store.path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_left_goes_and_what_a_living_one_uses_stays(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    ) as other:
        theirs = other.stdout.readline().strip()
        first = DiskTier(SegmentFolder(TemporaryFolder(tmp_path)), None)
        assert sorted(os.listdir(theirs)) == ["0.segment", "lock"]
        other.send_signal(signal.SIGKILL)
        other.wait()
        second = DiskTier(SegmentFolder(TemporaryFolder(tmp_path)), None)
        assert not os.path.exists(theirs)
        assert first.store.path.exists()
        first.close()
        second.close()


def test_a_process_that_ends_without_closing_leaves_nothing(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", OTHER, tmp_path], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip().startswith(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_what_others_keep_there_is_left_alone(tmp_path, stored):
    """Folders that look alike, with a file of the same name and without the marker; links; and files in our own folders."""
    thesis, marked = tmp_path / "speech.segments", tmp_path / "elsewhere"
    for folder, lock in (
        (thesis, None),
        (tmp_path / "locked.segments", b""),
        (tmp_path / "text.segments", b"mine"),
        (marked, MARKER),
    ):
        folder.mkdir()
        (folder / "thesis.segment").write_text("ten years of work")
        if lock is not None:
            (folder / "lock").write_bytes(lock)
    (tmp_path / "link.segments").symlink_to(marked)
    (tmp_path / "file.segments").write_text("a file")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    folder = DiskTier(SegmentFolder(TemporaryFolder(tmp_path)), None)
    write(folder, stored)
    own = folder.store.path / "notes.txt"
    own.write_text("a file of somebody's in the folder of a database")
    folder.close()
    after = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert after.pop(tmp_path / "lock") == b""
    assert after.pop(own).startswith(b"a file")
    assert not after.pop(own.parent)
    assert after == before


def test_a_folder_left_by_a_dead_database_is_cleared_by_its_marker(tmp_path):
    dead = tmp_path / "7-abc.segments"
    dead.mkdir()
    (dead / "0.segment").write_text("what it wrote")
    (dead / ".1.segment").write_text("what it was writing")
    (dead / "lock").write_bytes(MARKER)
    DiskTier(SegmentFolder(TemporaryFolder(tmp_path)), None).close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_path_that_is_no_folder_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="storage.disk_path .*file cannot be used"):
        TemporaryFolder(tmp_path / "file")
