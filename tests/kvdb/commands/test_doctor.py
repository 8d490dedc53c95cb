"""`kvdb doctor` says what was found, what will be used, and why not more. It must be quick, and loads nothing heavy."""

import json
import subprocess
import sys

import pytest

import kvdb
import kvdb.commands.environment as environment
import kvdb.gpu.probe as probe
import kvdb.hardware.kernels as kernels
import kvdb.hardware.profile as profile
from kvdb import _native
from kvdb.__main__ import main
from kvdb.gpu.probe import Card, Driver, TorchBuild
from query_optimizer.cost import GpuMachine, Machine

GIB = 1 << 30
CARDS = (Card("NVIDIA H200", 140 * GIB, (9, 0)), Card("Tesla T4", 15 * GIB, (7, 5)))


@pytest.fixture
def bare(monkeypatch):
    """A machine without a GPU or any library for one."""
    monkeypatch.setattr(probe, "find_driver", lambda: None)
    monkeypatch.setattr(probe, "installed_torch", lambda: None)
    monkeypatch.setattr(probe, "triton_installed", lambda: False)
    monkeypatch.setattr(environment, "_version", lambda names: None)


@pytest.fixture
def full(monkeypatch):
    """A machine with all of it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(probe, "find_driver", lambda: Driver("570.86.10", "12.8", CARDS))
    monkeypatch.setattr(probe, "installed_torch", lambda: TorchBuild("2.13.0", "12.8"))
    monkeypatch.setattr(probe, "triton_installed", lambda: True)
    monkeypatch.setattr(environment, "_version", lambda names: "9.9")


@pytest.fixture
def doctor(tmp_path, capsys):
    """What it says for a configuration: its lines by what they are about."""

    def run(config="", *flags):
        path = tmp_path / "kvdb.toml"
        path.write_text(config)
        assert main(["doctor", "--config", str(path), *flags]) == 0
        out = capsys.readouterr().out
        if "--json" in flags:
            return json.loads(out)
        found, used = out.split("will be used\n")
        said = [dict(line[2:].split("  ", 1) for line in part.splitlines() if line.startswith("  ")) for part in (found, used)]
        return [{name: text.strip() for name, text in part.items()} for part in said]

    return run


def test_a_bare_machine_uses_its_cpu_and_says_why(bare, doctor):
    found, used = doctor()
    assert found["kvdb"].startswith(kvdb.__version__)
    assert found["GPU driver"] == "none"
    assert {found[name] for name in ("torch", "triton", "faiss", "hnswlib")} == {"not installed"}
    assert found["instruction set"].split()[0] == _native.isa()
    assert "no folder is set" in found["disk"]
    threads = _native.threads()
    assert used == {
        "attention": f"CPU ({_native.isa()}, {threads} thread{'s' if threads > 1 else ''})",
        **{f"kernels of {choice.operation}": kernels.described(choice) for choice in kernels.choices({})},
        "GPU": "none, because there is no NVIDIA driver",
    }


def test_a_budget_without_a_card_says_what_to_do(bare, doctor):
    _, used = doctor("[storage]\ngpu_bytes_max = 1000000")
    assert used["GPU"] == "none, because there is no NVIDIA driver; install it, or set storage.gpu_bytes_max to 0"


def test_a_card_is_shown_and_used_where_there_is_a_budget(full, doctor):
    found, used = doctor()
    assert found["GPU driver"] == "NVIDIA 570.86.10, for CUDA up to 12.8"
    assert found["GPU 0"] == "NVIDIA H200, 140.0 GiB, compute capability 9.0, not calibrated; run kvdb calibrate"
    assert found["torch"] == "2.13.0, built with CUDA 12.8"
    assert found["triton"] == "9.9"
    assert used["GPU"] == "none, because storage.gpu_bytes_max is 0"
    _, used = doctor(f"[storage]\ngpu_bytes_max = {64 * GIB}")
    assert used["GPU"] == "NVIDIA H200 (cuda), 64.0 GiB for blocks in the model's dtype"
    _, used = doctor(f'[storage]\ngpu_bytes_max = {GIB // 2}\ngpu_format = "int8"\ngpu_device = "cuda:0"')
    assert used["GPU"] == "NVIDIA H200 (cuda:0), 512.0 MiB for blocks as int8"


def test_a_calibrated_card_is_told(full, doctor, tmp_path):
    path = tmp_path / "machine.json"
    profile.write(path, Machine(), {"NVIDIA H200": GpuMachine()})
    found, _ = doctor(f'[optimizer]\nmachine_file = "{path}"')
    assert found["GPU 0"].endswith("9.0, calibrated")
    assert found["GPU 1"].endswith("7.5, not calibrated; run kvdb calibrate")
    assert found["calibration"] == f"kept in {path}"
    found, _ = doctor('[optimizer]\nmachine_file = "/nowhere/machine.json"')
    assert found["calibration"] == "defaults: /nowhere/machine.json does not exist yet; run kvdb calibrate"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (f"gpu_bytes_max = {200 * GIB}", f"storage.gpu_bytes_max is {200 * GIB:,} bytes, and NVIDIA H200 has {140 * GIB:,}"),
        ('gpu_bytes_max = 1\ngpu_device = "cuda:2"', "storage.gpu_device is cuda:2, and the driver shows 2 GPUs"),
        ('gpu_bytes_max = 1\ngpu_device = "interpreter"', "storage.gpu_device is interpreter, without TRITON_INTERPRET=1"),
    ],
)
def test_what_connect_will_refuse_is_told_beforehand(full, doctor, settings, why):
    used = doctor(f"[storage]\n{settings}", "--json")["use"]
    assert used["refused"]
    assert used["gpu"] is None
    assert used["why"].startswith(why)
    _, used = doctor(f"[storage]\n{settings}")
    assert used["GPU"].startswith(f"none, because {why}")
    assert "kvdb.connect refuses these settings" in used.values()


def test_a_card_that_is_too_old_is_no_error(full, doctor):
    used = doctor('[storage]\ngpu_bytes_max = 1000\ngpu_device = "cuda:1"', "--json")["use"]
    assert not used["refused"]
    assert "compute capability 7.5; kernels need 8.0" in used["why"]


def test_a_driver_in_trouble_is_told(full, monkeypatch, doctor):
    monkeypatch.setattr(probe, "find_driver", lambda: Driver("", "12.8", (), "cuInit failed with 803, system has unsupported"))
    found, used = doctor("[storage]\ngpu_bytes_max = 1000")
    assert found["GPU driver"] == "NVIDIA of unknown version, for CUDA up to 12.8"
    assert found["GPU"] == "cuInit failed with 803, system has unsupported"
    assert "nvidia-smi" in used["GPU"]


def test_the_folder_is_looked_at_and_left_as_it_was(bare, doctor, tmp_path):
    folder = tmp_path / "segments"
    found, _ = doctor(f'[storage]\ndisk_path = "{folder}"')
    assert found["disk"] == f"{folder}: No such file or directory"
    folder.mkdir()
    disk = doctor(f'[storage]\ndisk_path = "{folder}"', "--json")["disk"]
    assert disk["free_bytes"] > 0
    assert disk["direct"] in {True, False, None}
    found, _ = doctor(f'[storage]\ndisk_path = "{folder}"')
    assert "page cache" in found["disk"]
    assert list(folder.iterdir()) == []


def test_json_has_what_the_table_has(full, doctor):
    found = doctor("", "--json")
    assert found["gpu"]["cards"][0] == {"name": "NVIDIA H200", "memory_total": 140 * GIB, "capability": [9, 0]}
    assert found["torch"] == {"version": "2.13.0", "cuda": "12.8"}
    assert found["machine"]["gpus"] == {"NVIDIA H200": False, "Tesla T4": False}
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]


def test_this_machine_is_told_of_without_loading_anything_heavy():
    script = (
        "import sys; from kvdb.__main__ import main; assert main(['doctor', '--json']) == 0; "
        "assert not sys.modules.keys() & {'torch', 'triton', 'faiss', 'hnswlib', 'grpc'}, 'something heavy was loaded'"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["use"]["attention"].startswith("CPU")


def test_a_wrong_configuration_is_one_line_and_status_2(tmp_path, capsys):
    path = tmp_path / "kvdb.toml"
    path.write_text('[storage]\ngpu_device = "tpu"')
    assert main(["doctor", "--config", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
