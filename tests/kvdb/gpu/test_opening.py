"""What a configuration asks for of a GPU: opened, refused, or told in one line that the CPU answers."""

import logging
import os

import numpy as np
import pytest

import kvdb
import kvdb.gpu.device as device_module
import kvdb.gpu.probe as probe
from kvdb.config import Config, StorageConfig
from kvdb.errors import ConfigError, GpuLost
from kvdb.gpu.opening import open_configured_device
from kvdb.gpu.probe import Card, Driver, TorchBuild

BUDGET = 1 << 20


def connect(**settings):
    return kvdb.connect(config=Config(storage=StorageConfig(**settings)))


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setattr(probe, "find_driver", lambda: None)


def answers(db):
    spec = kvdb.ModelSpec("tiny", layers=1, q_heads=2, kv_heads=2, head_dim=16, dtype="float32")
    k = np.ones((2, 3, 16), np.float32)
    with db.create_session(spec, []) as session:
        return np.allclose(session.attend(0, k, k, k), 1)


def test_without_a_budget_nothing_is_even_looked_for(monkeypatch, caplog):
    monkeypatch.setattr(probe, "find_driver", lambda: pytest.fail("the driver was asked"))
    with connect():
        pass
    assert not caplog.records


def test_without_a_driver_the_cpu_answers_and_one_line_says_so(no_driver, caplog):
    with caplog.at_level(logging.WARNING), connect(gpu_bytes_max=BUDGET) as db:
        assert answers(db)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == (
        "storage.gpu_bytes_max asks for a GPU, but queries will be answered by the CPU: there is no NVIDIA driver; install it, "
        "or set storage.gpu_bytes_max to 0"
    )


@pytest.mark.parametrize(
    ("torch", "triton", "said"),
    [
        (None, True, "torch is not installed; pip install"),
        (TorchBuild("2.13.0", "12.8"), False, "triton is not installed; pip install"),
        (TorchBuild("2.13.0+cpu", None), True, "torch 2.13.0+cpu is built without CUDA"),
    ],
)
def test_without_a_library_the_cpu_answers_and_one_line_says_so(monkeypatch, caplog, torch, triton, said):
    monkeypatch.setattr(probe, "find_driver", lambda: Driver("1", "12.8", (Card("NVIDIA H200", 1 << 37, (9, 0)),)))
    monkeypatch.setattr(probe, "installed_torch", lambda: torch)
    monkeypatch.setattr(probe, "triton_installed", lambda: triton)
    with caplog.at_level(logging.WARNING), connect(gpu_bytes_max=BUDGET) as db:
        assert answers(db)
    assert len(caplog.records) == 1
    assert said in caplog.text


def test_a_card_that_fails_at_once_leaves_it_to_the_cpu(monkeypatch, caplog):
    def lost(_):
        raise GpuLost("cuda failed (CUDA error: busy)")

    monkeypatch.setattr(probe, "missing_requirement", lambda *_: None)
    monkeypatch.setattr(device_module, "open_device", lost)
    with caplog.at_level(logging.WARNING):
        assert open_configured_device(StorageConfig(gpu_bytes_max=BUDGET)) is None
    assert "CUDA error: busy" in caplog.text


def test_the_interpreter_is_opened_and_closed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    device = open_configured_device(StorageConfig(gpu_bytes_max=BUDGET, gpu_device="interpreter"))
    assert device.interpreted
    device.close()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels of this process are compiled for a card")
def test_with_the_interpreter_queries_are_answered():
    with connect(gpu_bytes_max=BUDGET, gpu_device="interpreter") as db:
        assert answers(db)


def test_a_budget_larger_than_the_memory_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    total = open_configured_device(StorageConfig(gpu_bytes_max=BUDGET, gpu_device="interpreter")).memory_total
    with pytest.raises(ConfigError, match=f"gpu_bytes_max is {1 << 60:,} bytes, and .* has {total:,}"):
        connect(gpu_bytes_max=1 << 60, gpu_device="interpreter")


def test_a_wrong_device_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="storage.gpu_device is 'tpu'; expected cuda"):
        connect(gpu_bytes_max=BUDGET, gpu_device="tpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="wants TRITON_INTERPRET=1"):
        connect(gpu_bytes_max=BUDGET, gpu_device="interpreter")
