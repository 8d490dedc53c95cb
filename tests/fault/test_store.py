"""The short form of the faults that `make fault` plays at length: 25 kills, 17 power cuts, 3 stores with each mistake."""

import os
import shutil
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvdb.errors import IntegrityError
from kvdb.storage.store_folder import StoreFolder
from tests.fault import every_call, flips, kill, limits, mistakes, no_room, page_reads, power
from tests.fault.power import NoLoopMounts
from tests.stores import connect, holds, put

pytestmark = pytest.mark.needs_folder  # other processes, disks and whoever copies files


@pytest.mark.parametrize(
    ("durability", "limits", "kills"),
    [("durable", "wide", 12), ("durable", "narrow", 5), ("os", "wide", 4), ("memory", "wide", 4)],
)
def test_a_killed_process_loses_what_it_may_and_no_more(durability, limits, kills, tmp_path):
    assert kill.run(tmp_path / "store", kills, 11, durability, limits).total() > 0


@pytest.mark.parametrize(("durability", "cuts"), [("durable", 12), ("os", 5)])
def test_a_power_cut_loses_what_it_may_and_no_more(durability, cuts):
    try:
        calls, _ = power.run(cuts, 13, durability)
    except NoLoopMounts as reason:
        pytest.skip(str(reason))
    assert calls.total() > 0


def test_a_writer_that_syncs_no_file_is_caught():
    """The control: a harness that finds nothing here would find nothing anywhere."""
    try:
        with pytest.raises((AssertionError, IntegrityError)):
            power.run(10, seed=13, durability="broken")
    except NoLoopMounts as reason:
        pytest.skip(str(reason))


class Disk:
    """The folder of a store as a power cut leaves it that comes at the worst moment: names that came since their folder was last
    synced are not there. File systems with a log, as ext4, sync more than they must."""

    def __init__(self, monkeypatch):
        self._new = {}
        rename, fsync = os.rename, os.fsync

        def renamed(source, target):
            rename(source, target)
            self._new[Path(target)] = Path(source).name

        def synced(file):
            fsync(file)
            if stat.S_ISDIR(os.fstat(file).st_mode):
                folder = Path(os.readlink(f"/proc/self/fd/{file}"))
                self._new = {path: name for path, name in self._new.items() if path.parent != folder}

        monkeypatch.setattr(os, "rename", renamed)
        monkeypatch.setattr(os, "fsync", synced)

    def left(self, folder, copy):
        shutil.copytree(folder, copy)
        for path, name in list(self._new.items()):
            now = copy / path.relative_to(folder)
            now.rename(now.with_name(name))
        return copy


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to tell the names of open files")
@pytest.mark.parametrize("broken", [False, True])
def test_names_are_on_the_disk_before_they_are_acknowledged(broken, tmp_path, monkeypatch):
    """Also a control: a writer that does not sync the folder is caught."""
    disk = Disk(monkeypatch)
    with connect(tmp_path / "store") as db:
        if broken:
            monkeypatch.setattr(StoreFolder, "sync", lambda _: None)
        put(db, flips.CONTEXTS["doc"], "doc")
        with connect(disk.left(tmp_path / "store", tmp_path / "left")) as left:
            assert holds(left, flips.CONTEXTS["doc"]) == (not broken)


def test_changed_bits_never_change_an_answer():
    outcomes = sum(flips.run(flips=40, seed=12).values(), Counter())
    assert outcomes["told"] + outcomes["refused"] > 0
    assert outcomes["harmless"] > 0


def test_mistakes_lose_nothing_that_was_acknowledged(integrity_watch):
    assert mistakes.run(3, seed=14).total() == 3 * len(mistakes.MISTAKES)
    integrity_watch.take_errors()  # the first of two writers knows nothing of the other's files


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(("fault", "call"), [("KILL", "rename"), ("EIO", "unlink"), ("EIO-READ", "preadv2")])
def test_a_fault_at_any_call_loses_nothing(fault, call):
    try:
        met = every_call.run_all(fault, calls=(call,))
    except every_call.NotTraced as reason:
        pytest.skip(str(reason))
    assert met[call] > 0


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_pages_that_cannot_be_read_refuse_an_answer_and_the_session_goes_on():
    try:
        with page_reads.tracing() as tracer:
            outcomes = sum(map(tracer.run, ["1", "2", "1+"]), Counter())
    except every_call.NotTraced as reason:
        pytest.skip(str(reason))
    assert outcomes["right"] > 0
    assert outcomes["refused"] > 0


def test_few_open_files_suffice_and_none_is_a_typed_error():
    """In a process of its own: how many files another has open depends on the tests that it ran before."""
    command = [sys.executable, "-m", "tests.fault.limits", "--only-files"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "24 contexts stored, nothing lost" in done.stdout


@pytest.mark.parametrize("fault", [limits.full_disk, limits.read_only_disk, limits.read_only_in_use])
def test_a_file_system_with_a_limit(fault):
    try:
        fault()
    except NoLoopMounts as reason:
        pytest.skip(str(reason))


def test_a_disk_without_room_for_one_more_call():
    try:
        refused = no_room.run_all(every=100_000)
    except NoLoopMounts as reason:
        pytest.skip(str(reason))
    assert refused["put"] > 0


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_sync_that_is_tried_again_is_caught():
    """The control of faults at syncs."""
    try:
        with pytest.raises(AssertionError, match="is synced again"):
            every_call.run_all("EIO", calls=("fsync",), writer="retrying")
    except every_call.NotTraced as reason:
        pytest.skip(str(reason))
