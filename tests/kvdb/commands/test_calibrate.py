"""`kvdb calibrate`, and a server that measures its machine when it starts."""

import json
import os
import signal
import subprocess
import sys

import pytest

import kvdb.commands.calibrate as command
import kvdb.hardware.profile as profile
from kvdb import _native
from kvdb.__main__ import main
from kvdb.errors import GpuLost
from kvdb.hardware.calibrate import Calibration
from query_optimizer.cost import GpuMachine, Machine

MEASURED = Machine(stream_bytes_s=1.5e10, operations_s=2.7e11)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(command, "calibrate", lambda: Calibration(MEASURED, {"scan": {_native.isa(): 1e-4}}))
    monkeypatch.setattr(command.probe, "find_driver", lambda: None)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))


def test_a_table_says_what_was_measured_and_how_it_differs(quick, tmp_path, capsys):
    path = tmp_path / "machine.json"
    assert main(["calibrate", "--file", str(path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["what", "value", "unit", "default", "change"]
    assert "attention over main memory 15.0 GB/s 30.0 -50%" in [" ".join(line.split()) for line in said]
    assert ["multiplications", "270.0", "G/s", "135.0", "+100%"] in [line.split() for line in said]
    assert f"kept in {path}" in said[-2]
    assert "does not exist yet" in said[-1]
    assert profile.read(path) == MEASURED
    assert main(["calibrate", "--file", str(path)]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[0].split()[3] == "before"
    assert all(line.endswith("+0%") for line in again[1:10])
    assert f"kept in {path}" in again[-1]


def test_a_busy_machine_is_told_of(quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (999.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 10)
    assert main(["calibrate", "--file", str(tmp_path / "machine.json")]) == 0
    assert "busy, with a load of 99.9 for each CPU" in capsys.readouterr().out.splitlines()[-1]


def test_a_busy_machine_keeps_the_good_numbers_it_has(quick, monkeypatch, tmp_path, capsys):
    path = tmp_path / "machine.json"
    profile.write(path, Machine(jump_s=2e-7), {"NVIDIA H200": GpuMachine()})
    before = path.read_bytes()
    monkeypatch.setattr("os.getloadavg", lambda: (999.0, 0.0, 0.0))
    assert main(["calibrate", "--file", str(path)]) == 0
    assert f"not kept: {path} holds what was measured before" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_a_busy_machine_without_numbers_keeps_what_it_has_now(quick, monkeypatch, tmp_path):
    path = tmp_path / "machine.json"
    monkeypatch.setattr("os.getloadavg", lambda: (999.0, 0.0, 0.0))
    assert main(["calibrate", "--file", str(path)]) == 0
    assert profile.read(path) == MEASURED


def test_other_threads_are_measured_beside_the_good_numbers(tmp_path):
    path = tmp_path / "machine.json"
    for threads in ("1", "3"):
        command = [sys.executable, "-m", "kvdb", "calibrate", "--file", str(path)]
        subprocess.run(command, env=os.environ | {"KVDB_THREADS": threads}, capture_output=True, check=True)
        if threads == "1":
            (first,) = json.loads(path.read_text())["entries"]
    kept = json.loads(path.read_text())["entries"]
    assert [entry["of"]["threads"] for entry in kept] == [1, 3]
    assert kept[0] == first


def test_every_number_is_shown():
    assert [field for field, *_ in command.SHOWN] == list(Machine().to_dict())
    assert [field for field, *_ in command.GPU_SHOWN] == list(GpuMachine().to_dict())


def test_a_gpu_is_measured_too(quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    config, path = tmp_path / "kvdb.toml", tmp_path / "machine.json"
    config.write_text(f'[storage]\ngpu_device = "interpreter"\n[optimizer]\nmachine_file = "{path}"\n')
    assert main(["calibrate", "--config", str(config)]) == 0
    (card,) = profile.read_gpus(path)
    said = capsys.readouterr().out.splitlines()
    assert said[said.index(card) + 1].split() == ["what", "value", "unit", "assumed", "change"]
    assert profile.read(path) == MEASURED
    assert main(["calibrate", "--config", str(config)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[said.index(card) + 1].split() == ["what", "value", "unit", "before", "change"]


def test_a_gpu_that_fails_leaves_the_cpus_numbers(quick, monkeypatch, tmp_path, capsys):
    def lost(_):
        raise GpuLost("the card failed")

    path = tmp_path / "machine.json"
    monkeypatch.setattr(command.probe, "missing_requirement", lambda *_: None)
    monkeypatch.setattr("kvdb.gpu.device.open_device", lost)
    assert main(["calibrate", "--file", str(path)]) == 0
    assert "the GPU was not measured: the card failed" in capsys.readouterr().out.splitlines()
    assert profile.read(path) == MEASURED
    assert profile.read_gpus(path) == {}


def test_it_goes_where_the_configuration_says(quick, tmp_path, capsys):
    path, config = tmp_path / "kept" / "machine.json", tmp_path / "kvdb.toml"
    config.write_text(f'[optimizer]\nmachine_file = "{path}"\n')
    assert main(["calibrate", "--config", str(config)]) == 0
    assert profile.read(path) == MEASURED
    config.write_text('[optimizer]\nmachine_file = ""\n')
    path.unlink()
    assert main(["calibrate", "--config", str(config)]) == 0
    assert "kept nowhere" in capsys.readouterr().out
    assert not path.exists()


def test_a_damaged_file_is_written_anew(quick, tmp_path, capsys):
    path = tmp_path / "machine.json"
    path.write_text("{")
    assert main(["calibrate", "--file", str(path)]) == 0
    assert "no JSON" in capsys.readouterr().out
    assert profile.read(path) == MEASURED


def test_a_bad_place_is_one_line_and_status_2(quick, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert main(["calibrate", "--file", str(tmp_path / "file" / "machine.json")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be written" in said


def test_a_server_measures_once_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    heard = []
    for _ in range(2):
        server = [sys.executable, "-m", "kvdb.__main__", "serve", "--port", "0"]
        with subprocess.Popen(server, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            assert " ready on " in running.stdout.readline()
            running.send_signal(signal.SIGTERM)
            lines = running.communicate(timeout=10)[1].splitlines()
            heard.append([line for line in lines if "info server_" not in line])
            assert running.returncode == 0
    path = tmp_path / "kvdb" / "machine.json"
    assert heard == [[f"kvdb measured this machine, kept in {path}"], []]
    assert profile.read(path) != Machine()
