"""A device says what its failures mean, counts what it holds, and keeps copies and queries in order."""

import gc
import sys
from contextlib import nullcontext
from threading import Barrier, Thread
from types import SimpleNamespace

import pytest
import torch

import kvdb.gpu.device as module
import kvdb.gpu.probe as probe
from kvdb.errors import CapacityError, ConfigError, GpuLost, Unsupported
from kvdb.gpu.device import Device, open_device
from kvdb.gpu.launch import launching
from kvdb.gpu.probe import Card, Driver, TorchBuild
from tests.racing import race
from tests.waiting import SECONDS_MAX

H200 = Driver("570.86", "12.8", (Card("NVIDIA H200", 1 << 37, (9, 0)),))


@pytest.fixture
def interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    device = open_device("interpreter")
    yield device
    device.close()


@pytest.fixture
def card(monkeypatch):
    """A machine with one card, as far as it can be told without touching it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(probe, "find_driver", lambda: H200)
    monkeypatch.setattr(probe, "installed_torch", lambda: TorchBuild("2.13.0", "12.8"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_the_interpreter_is_a_device_of_the_cpu(interpreter):
    assert interpreter.torch == torch.device("cpu")
    assert interpreter.interpreted
    assert interpreter.memory_total > 0
    with interpreter.on(interpreter.copy_stream):
        assert interpreter.zeros((3, 4), torch.float32).sum() == 0
    interpreter.wait()


@pytest.mark.parametrize("name", ["cuda:x", "cuda:", "gpu", "cpu", "", "CUDA"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ConfigError, match="expected cuda, cuda:0 and so on, or interpreter"):
        open_device(name)


def test_the_interpreter_must_be_asked_for_before_triton_is_imported(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="wants TRITON_INTERPRET=1"):
        open_device("interpreter")


def test_a_card_is_opened_with_two_streams_and_pinned_staging(card, monkeypatch):
    made, entered, emptied, pinned = [], [], [], []

    class Stream(Late):
        def __init__(self, where, priority=0):
            super().__init__([])
            made.append((where, priority))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(entered.append(stream)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA H200", total_memory=1 << 37))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    device = open_device("cuda")
    assert (device.torch, device.card, device.name) == (torch.device("cuda", 0), "NVIDIA H200", "NVIDIA H200 (cuda:0)")
    assert not device.interpreted
    assert made == [(device.torch, 0), (device.torch, -1)]  # nothing delays queries
    assert device.copy_stream is not device.query_stream
    assert device.memory_total == 1 << 37
    with device.on(device.copy_stream):
        assert entered == [device.copy_stream]
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: pinned.append(pin_memory) or empty(*a, **k))
    device.staging.take(10).sent(device.copy_stream)
    assert pinned == [True]
    device.close()
    assert emptied == [True]
    assert device.pinned_nbytes == 0


def test_a_card_that_is_not_there_is_refused(card, monkeypatch):
    with pytest.raises(ConfigError, match="storage.gpu_device is cuda:1; expected a number below 1"):
        open_device("cuda:1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET is set"):
        open_device("cuda")


def test_a_card_that_cannot_be_used_says_why(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="finds no GPU that it can use; update the driver"):
        open_device("cuda")
    monkeypatch.setattr(probe, "find_driver", lambda: None)
    with pytest.raises(Unsupported, match="no NVIDIA driver"):
        open_device("cuda")


def test_a_card_that_fails_when_it_is_opened_is_lost(card, monkeypatch):
    def busy(_):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might")

    monkeypatch.setattr(torch.cuda, "get_device_properties", busy)
    with pytest.raises(GpuLost, match=r"cuda failed .CUDA error: all CUDA-capable devices are busy or unavailable."):
        open_device("cuda")


def raising(error):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_spent_memory_is_a_capacity_error_and_the_device_goes_on(interpreter, monkeypatch, error):
    monkeypatch.setattr(torch, "zeros", raising(error))
    with pytest.raises(CapacityError, match="no memory left .* lower storage.gpu_bytes_max") as raised:
        interpreter.zeros((2,), torch.float32)
    assert raised.value.__cause__ is error
    assert not interpreter.lost
    monkeypatch.undo()
    assert interpreter.zeros((2,), torch.float32).shape == (2,)


FAILURES = [
    RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("CUDA error: the launch timed out and was terminated"),
    *([torch.AcceleratorError("unspecified launch failure")] if hasattr(torch, "AcceleratorError") else []),
]


@pytest.mark.parametrize("error", FAILURES, ids=str)
def test_a_failed_card_is_lost_and_nothing_is_launched_any_more(interpreter, monkeypatch, error):
    monkeypatch.setattr(torch, "zeros", raising(error))
    with pytest.raises(GpuLost, match="main memory has all of it"):
        interpreter.zeros((2,), torch.float32)
    assert interpreter.lost
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("something was launched on a lost device"))
    for call in (lambda: interpreter.zeros((2,), torch.float32), interpreter.wait, interpreter.copies_after_queries):
        with pytest.raises(GpuLost, match="failed before"):
            call()
    interpreter.close()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
        RuntimeError("shape '[3]' is invalid for input of size 4"),
        ValueError("CUDA error: said by a caller"),
    ],
)
def test_our_own_bugs_stay_what_they_are(interpreter, error):
    with pytest.raises(type(error)) as raised, interpreter.watch():
        raise error
    assert raised.value is error
    assert not interpreter.lost


def test_an_error_inside_another_watch_is_translated_once(interpreter):
    with pytest.raises(GpuLost) as raised, interpreter.watch(), interpreter.watch():
        raise RuntimeError("CUDA error: unspecified launch failure")
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert interpreter.lost


def test_memory_counts_until_the_last_tensor_that_uses_it_is_gone(interpreter):
    whole = interpreter.zeros((10, 100), torch.float32)
    assert interpreter.tracked_nbytes == 4000
    table = interpreter.tracked(torch.empty(7, dtype=torch.int32))
    assert interpreter.tracked_nbytes == 4028
    part = whole[3:4].view(torch.uint8)
    del whole
    gc.collect()
    assert interpreter.tracked_nbytes == 4028
    del part, table
    gc.collect()
    assert interpreter.tracked_nbytes == 0


def test_memory_that_threads_count_at_once_counts_once(interpreter, monkeypatch):
    """Several steps share a buffer, and each counts what it holds; the last one to let go of it forgets it once."""
    reported, shared, met = [], [torch.zeros(1000) for _ in range(500)], Barrier(2)
    monkeypatch.setattr(sys, "unraisablehook", reported.append)

    def count():
        for i in range(len(shared)):
            met.wait(SECONDS_MAX)
            interpreter.tracked(shared[i])

    race(count, count, seconds=0)
    assert interpreter.tracked_nbytes == 500 * 4000
    shared.clear()
    gc.collect()
    assert interpreter.tracked_nbytes == 0
    assert not reported


def test_one_thread_at_a_time_launches_on_a_stream(card, monkeypatch):
    """Steps of several sessions share work space, which the launches of one must not meet in another's."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Late([]))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA H200", total_memory=1 << 37))
    device = open_device("cuda")
    streams, inside = (device.query_stream, device.copy_stream), []

    def launch(stream):
        with launching(device, stream), launching(device, stream):
            inside.append(stream)
            assert inside.count(stream) == 1
            inside.remove(stream)

    race(*(lambda stream=stream: launch(stream) for stream in streams for _ in range(2)))
    with launching(device, device.copy_stream):  # which holds no queries up
        asking = Thread(target=launch, args=(device.query_stream,), daemon=True)
        asking.start()
        asking.join(SECONDS_MAX)
        assert not asking.is_alive()


def test_closing_a_device_that_fails_meanwhile_is_no_error(interpreter, monkeypatch):
    monkeypatch.setattr(interpreter.staging, "close", raising(RuntimeError("CUDA error: unspecified launch failure")))
    interpreter.close()
    assert interpreter.lost


class Behind:
    """An event of such a stream."""

    def __init__(self, stream, launched):
        self.stream, self.launched = stream, launched

    def query(self):
        return not any(self.stream.work[: self.launched])

    def synchronize(self):
        self.stream.until(self.launched)


class Late:
    """A stream whose work is done as late as the order allows; what runs is written down."""

    def __init__(self, ran):
        self.ran, self.work = ran, []

    def launch(self, name):
        self.work.append((name, []))

    def record_event(self):
        return Behind(self, len(self.work))

    def wait_event(self, event):
        self.work.append((None, [event]))

    def query(self):
        return not any(self.work)

    def synchronize(self):
        self.until(len(self.work))

    def until(self, count):
        """The first `count` of what was launched, and what it waits for."""
        for index in range(count):
            if self.work[index] is not None:
                (name, events), self.work[index] = self.work[index], None
                for event in events:
                    event.synchronize()
                if name is not None:
                    self.ran.append(name)


@pytest.fixture
def late(monkeypatch, interpreter):
    ran = []
    interpreter.copy_stream, interpreter.query_stream = Late(ran), Late(ran)
    return interpreter, ran


def test_copies_write_nothing_that_a_query_still_reads(late):
    device, ran = late
    device.query_stream.launch("query")
    device.copies_after_queries()
    device.copy_stream.launch("copy")
    device.query_stream.launch("next query")
    device.copy_stream.synchronize()
    assert ran == ["query", "copy"]


def test_memory_that_was_made_zero_on_one_stream_is_zero_for_both(late, monkeypatch):
    device, ran = late
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: device.query_stream.launch("zero") or zeros(*a, **k))
    device.zeros((4,), torch.uint8)
    device.copy_stream.launch("copy")
    device.copy_stream.synchronize()
    assert ran == ["zero", "copy"]


def test_a_device_of_one_name_is_told_from_another():
    device = Device(torch.device("cpu"), "NVIDIA H200", 1 << 30)
    assert (device.card, device.name) == ("NVIDIA H200", "NVIDIA H200 (cpu)")
    assert module.INTERPRETER == "interpreter"
