"""What is measured of a machine, and the file that keeps it."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import kvdb
import kvdb.hardware.kernels as kernels
import kvdb.hardware.profile as profile
from kvdb import _native
from kvdb.config import OWN_CACHE, Config, OptimizerConfig
from kvdb.database import Database
from kvdb.errors import ConfigError
from kvdb.hardware.calibrate import calibrate
from query_optimizer.cost import Machine

MEASURED = Machine(stream_bytes_s=1.5e10, jump_s=2e-7)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "machine.json"


def test_what_is_measured_is_sane_even_while_others_work(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (999.0, 0.0, 0.0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        spent = []
        for _ in range(2):  # the machine may have more to do than this test gives it
            started = time.perf_counter()
            found, times = (calibration := calibrate()).machine, calibration.kernels
            spent.append(time.perf_counter() - started)
        assert min(spent) < 3
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert set(times) == set(_native.kernels())
    assert all(0 < spent < 1 for of in times.values() for spent in of.values())
    assert 1e8 < found.stream_bytes_s <= found.cached_bytes_s < 1e13
    assert 1 << 20 <= found.cache_bytes < 1 << 30
    assert 1e8 < found.operations_s < 1e14
    assert 1e-9 < found.jump_s < 1e-3
    assert 1e7 < found.gather_bytes_s < 1e13
    assert found.exact_call_s < found.step_s + found.search_s < 1
    assert all(math.isfinite(value) and value > 0 for value in found.to_dict().values())


@pytest.mark.parametrize("load", [0.0, 999.0])
def test_kernels_are_told_apart_and_the_fastest_used_even_on_a_busy_machine(monkeypatch, load):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    before = _native.kernels()
    try:
        times = calibrate().kernels
        assert {name: set(of) for name, of in times.items()} == {name: set(_native.variants()) for name in before}
        assert _native.kernels() == {name: kernels.fastest(of, before[name]) for name, of in times.items()}
    finally:
        for operation, isa in before.items():
            _native.set_kernels(operation, isa)


def test_a_file_is_read_as_it_was_written(path):
    profile.write(path, MEASURED)
    assert profile.read(path) == MEASURED
    assert profile.load(str(path)) == profile.MachineProfile(MEASURED, True, str(path))
    profile.write(path, Machine())
    assert profile.read(path) == Machine()
    assert list(path.parent.iterdir()) == [path]


def test_a_missing_file_means_the_defaults(path):
    loaded = profile.load(str(path))
    assert (loaded.machine, loaded.measured) == (Machine(), False)
    assert "does not exist" in loaded.source
    assert profile.load("").machine == Machine()


@pytest.mark.parametrize("name", ["processor", "threads", "isa"])
def test_the_numbers_of_another_machine_or_other_threads_are_left_alone(path, monkeypatch, name):
    profile.write(path, MEASURED)
    here = profile.identity()
    monkeypatch.setattr(profile, "identity", lambda: here | {name: "another"})
    with pytest.raises(ConfigError, match="another machine or other threads"):
        profile.read(path)
    assert profile.load(str(path)).machine == Machine()
    assert "another machine" in profile.load(str(path)).source
    profile.write(path, Machine(jump_s=3e-7))
    assert profile.read(path) == Machine(jump_s=3e-7)
    monkeypatch.undo()
    assert profile.read(path) == MEASURED


def test_a_file_keeps_the_newest_entries_of_many(path, monkeypatch):
    here = profile.identity()
    for threads in range(40):
        monkeypatch.setattr(profile, "identity", lambda threads=threads: here | {"threads": threads})
        profile.write(path, MEASURED)
    kept = json.loads(path.read_text())["entries"]
    assert [entry["of"]["threads"] for entry in kept] == list(range(40 - profile.ENTRIES_MAX, 40))


def test_a_damaged_file_is_refused_wherever_it_is_cut(path):
    profile.write(path, MEASURED)
    whole = path.read_bytes()
    for length in range(len(whole) - 2):  # the last brace, and the line's end
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="kvdb calibrate"):
            profile.read(path)
    assert profile.load(str(path)).machine == Machine()


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: [],
        lambda kept: {**kept, "format": 3},
        lambda kept: {**kept, "entries": None},
        lambda kept: {**kept, "entries": []},
        lambda kept: {**kept, "entries": [3]},
        lambda kept: with_machine(kept, None),
        lambda kept: with_machine(kept, {}),
        lambda kept: with_machine(kept, {**MEASURED.to_dict(), "jump_s": 0}),
        lambda kept: with_machine(kept, {**MEASURED.to_dict(), "jump_s": "fast"}),
    ],
    ids=["list", "format", "no entries", "empty entries", "number", "none", "empty", "zero", "word"],
)
def test_other_contents_are_refused(path, change):
    profile.write(path, MEASURED)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ConfigError, match="kvdb calibrate"):
        profile.read(path)


def with_machine(kept, machine):
    """The contents of a file, its one entry with this machine."""
    return {**kept, "entries": [{**kept["entries"][0], "machine": machine}]}


def test_a_place_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("x")
    for wrong in (tmp_path / "file" / "machine.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            profile.write(wrong, MEASURED)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert [entry.name for entry in tmp_path.parent.iterdir() if entry.name.endswith(".part")] == []


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile.path_of(OWN_CACHE) == tmp_path / "kvdb" / "machine.json"
    monkeypatch.setenv("HOME", "/home/somebody")
    for ignored in ("", "relative"):  # as the XDG specification has it
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert profile.path_of(OWN_CACHE) == Path("/home/somebody/.cache/kvdb/machine.json")
    assert profile.path_of("~/m.json") == Path("/home/somebody/m.json")
    assert profile.path_of("") is None


def test_a_database_knows_its_machine_and_measures_nothing(path, monkeypatch):
    monkeypatch.setattr("kvdb.hardware.calibrate.calibrate", lambda: pytest.fail("connect must not measure"))
    config = Config(optimizer=OptimizerConfig(machine_file=str(path)))
    with kvdb.connect(config=config):
        pass
    assert not path.exists()
    profile.write(path, MEASURED)
    with Database(config) as database:
        assert database.machine == MEASURED
    with Database(replace(config, optimizer=OptimizerConfig(machine_file=os.devnull))) as database:
        assert database.machine == Machine()
