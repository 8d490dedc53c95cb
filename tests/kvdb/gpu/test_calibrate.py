"""A device is measured: under the interpreter the numbers mean little, but they are numbers."""

import json
import math
import time

import pytest
import torch

import kvdb.hardware.profile as profile
from kvdb.errors import GpuLost
from kvdb.gpu.calibrate import calibrate
from kvdb.gpu.device import Device
from query_optimizer.cost import GpuMachine, Machine, WrongMachine

MEASURED = GpuMachine(stream_bytes_s=4.1e12, call_s=9e-6)


@pytest.fixture
def device():
    return Device(torch.device("cpu"), "a card", 1 << 30)


def test_everything_is_measured_and_little_is_taken(device):
    started = time.perf_counter()
    found = calibrate(device)
    assert time.perf_counter() - started < 5
    assert all(math.isfinite(value) and value > 0 for value in found.to_dict().values())
    assert found.gather_bytes_s <= found.stream_bytes_s
    assert found.call_s <= found.step_s
    assert all(value != GpuMachine().to_dict()[name] for name, value in found.to_dict().items())
    device.close()
    assert (device.tracked_nbytes, device.pinned_nbytes) == (0, 0)


def test_a_card_that_fails_meanwhile_is_lost(device, monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "matmul", failing)
    with pytest.raises(GpuLost):
        calibrate(device)


def test_numbers_are_kept_with_the_cards_name_and_stay_when_the_cpu_is_measured_again(tmp_path):
    path = tmp_path / "machine.json"
    profile.write(path, Machine(), {"NVIDIA H200": MEASURED})
    profile.write(path, Machine(jump_s=2e-7))
    profile.write(path, Machine(jump_s=3e-7), {"NVIDIA H100": GpuMachine()})
    assert profile.read(path) == Machine(jump_s=3e-7)
    assert profile.read_gpus(path) == {"NVIDIA H200": MEASURED, "NVIDIA H100": GpuMachine()}
    assert profile.load_gpu(str(path), "NVIDIA H200") == profile.GpuProfile(MEASURED, True)
    assert profile.load_gpu(str(path), "another") == profile.GpuProfile(GpuMachine(), False)
    assert profile.load_gpu("", "NVIDIA H200") == profile.GpuProfile(GpuMachine(), False)


@pytest.mark.parametrize("gpus", ["[]", '{"NVIDIA H200": {"stream_bytes_s": 1}}', '{"NVIDIA H200": 3}'])
def test_damaged_numbers_of_cards_are_the_defaults(tmp_path, gpus):
    path = tmp_path / "machine.json"
    profile.write(path, Machine(jump_s=3e-7))
    kept = json.loads(path.read_text())
    kept["entries"][0]["gpus"] = json.loads(gpus)
    path.write_text(json.dumps(kept))
    assert profile.read(path) == Machine(jump_s=3e-7)
    assert profile.load_gpu(str(path), "NVIDIA H200") == profile.GpuProfile(GpuMachine(), False)
    profile.write(path, Machine(), {"NVIDIA H200": MEASURED})
    assert profile.read_gpus(path) == {"NVIDIA H200": MEASURED}


def test_seconds_follow_the_bytes_and_the_operations():
    card = GpuMachine(stream_bytes_s=1e12, gather_bytes_s=5e11, operations_s=1e14, host_bytes_s=5e10, call_s=1e-5, step_s=3e-5)
    assert card.exact_seconds(1e9) == pytest.approx(1e-5 + 1e-3)
    assert card.exact_seconds(1e9, operations=1e12) == pytest.approx(1e-5 + 1e-2)
    assert card.search_seconds(1e9, 1e8) == pytest.approx(3e-5 + 1e-3 + 2e-4)
    assert GpuMachine.from_dict(card.to_dict()) == card
    with pytest.raises(WrongMachine, match="call_s is 0"):
        GpuMachine(call_s=0)
    with pytest.raises(WrongMachine, match="expected stream_bytes_s"):
        GpuMachine.from_dict(Machine().to_dict())
