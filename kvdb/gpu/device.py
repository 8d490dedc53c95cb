"""An open GPU: where its tensors live, its two streams, and what its failures mean."""

import os
import re
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from threading import RLock
from types import TracebackType
from typing import cast

import torch

import kvdb.gpu.probe as probe
from kvdb.config import GPU_DEVICE
from kvdb.errors import CapacityError, ConfigError, GpuLost, Unsupported
from kvdb.gpu.staging import Staging
from kvdb.gpu.streams import DeviceStream, ImmediateStopwatch, ImmediateStream, Stopwatch
from kvdb.storage.tier import Blocks

INTERPRETER = "interpreter"
INTERPRETED = "TRITON_INTERPRET"
DEVICE_ERRORS = re.compile(r"CUDA error|\[CUDA\]|CUDA driver|cuda runtime error|C(UBLAS|UDNN|USOLVER)_STATUS|NVRTC")
"""Matches a RuntimeError of torch or Triton that comes from the card, not from a bug of the caller."""
OUT_OF_MEMORY = "out of memory"


class Device:
    """A card, or the CPU under Triton's interpreter. Thread-safe, but one thread at a time may launch on a stream: whoever does
    holds its `launch_lock`.

    torch: the device of its tensors. card: the card's model. name: the model and the number. memory_total: bytes. lost: whether
    it failed; from then on nothing is launched.

    Blocks are copied on copy_stream while queries are answered on query_stream. `copies_after_queries` makes copies wait for
    queries on the device, without the host waiting. A tensor that was allocated on one stream and is used on the other must be
    marked with `tensor.record_stream`, or stay alive until both are done with it, because its memory is used again on its own
    stream as soon as the host frees it.

    staging: pinned buffers for blocks. query_staging: those for queries and results, so that no query waits for blocks.
    """

    def __init__(self, where: torch.device, card: str, memory_total: int) -> None:
        self.torch = where
        self.card = card
        self.name = f"{card} ({where})"
        self.memory_total = memory_total
        self.interpreted = where.type == "cpu"
        self.lost = False
        with self.watch():
            self.copy_stream, self.query_stream = self._stream(), self._stream(priority=-1)  # nothing delays queries
        self.staging, self.query_staging = (Staging(pinned=not self.interpreted) for _ in range(2))
        # Bytes of tracked memory by its address. Without a lock, because memory may be freed in the middle of anything.
        self._tracked: dict[int, int] = {}
        self._launch_locks = RLock(), RLock()

    @property
    def tracked_nbytes(self) -> int:
        """Bytes of all live tensors that `tracked` was called with."""
        return sum(list(self._tracked.values()))

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of main memory that are pinned for copies."""
        return self.staging.nbytes + self.query_staging.nbytes

    def watch(self) -> "DeviceWatch":
        """Translate errors of everything inside, which allocates, launches or waits on the device.

        Raises CapacityError where its memory is used up, after which the device goes on. Raises GpuLost where it fails, or failed
        before: a failed kernel makes a process's CUDA context useless. Other errors are bugs and are raised as they are.
        """
        return DeviceWatch(self)

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Make this stream the current one: tensors allocated and kernels launched inside belong to it."""
        if self.interpreted:
            return nullcontext()
        return torch.cuda.stream(cast("torch.cuda.Stream", stream))

    def launch_lock(self, stream: DeviceStream) -> "RLock":
        """The lock of one of its two streams."""
        copying, querying = self._launch_locks
        return copying if stream is self.copy_stream else querying

    def copies_after_queries(self) -> None:
        """Let copies launched from now on begin after all queries launched so far. Raises GpuLost."""
        with self.watch():
            self.copy_stream.wait_event(self.query_stream.record_event())

    def overwrite(self, slab: torch.Tensor, rows: Blocks) -> None:
        """Make rows of a slab zeros, behind the queries launched so far and before all that are launched later. Raises
        GpuLost."""
        with self.launch_lock(self.query_stream), self.watch(), self.on(self.query_stream):
            slab.index_fill_(0, torch.from_numpy(rows).to(self.torch), 0)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tracked tensor that both streams may use at once. Raises CapacityError or GpuLost."""
        with self.watch(), self.on(self.query_stream):
            tensor = torch.zeros(shape, dtype=dtype, device=self.torch)
            self.copies_after_queries()
        return self.tracked(tensor)

    def tracked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the tensor's memory in `tracked_nbytes` until the last tensor that uses it is gone. Returns the tensor."""
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        if begin and begin not in self._tracked:
            self._tracked[begin] = storage.nbytes()
            weakref.finalize(storage, self._tracked.pop, begin, None)  # None: another thread may have counted it meanwhile
        return tensor

    def wait(self) -> None:
        """Wait on the host until queries that were launched are answered. Raises CapacityError or GpuLost."""
        with self.watch():
            self.query_stream.synchronize()

    def close(self) -> None:
        """Wait for everything that was launched, and free memory. All tensors must be gone before. Does nothing on a lost
        device."""
        with suppress(GpuLost), self.watch():
            self.copy_stream.synchronize()
            self.query_stream.synchronize()
            self.staging.close()
            self.query_staging.close()
            if not self.interpreted:
                torch.cuda.empty_cache()

    def callers_stream(self) -> DeviceStream:
        """The stream on which the calling thread launches."""
        return self.query_stream if self.interpreted else cast("DeviceStream", torch.cuda.current_stream(self.torch))

    def stopwatch(self) -> Stopwatch:
        return ImmediateStopwatch() if self.interpreted else CardStopwatch()

    def _stream(self, priority: int = 0) -> DeviceStream:
        return ImmediateStream() if self.interpreted else cast("DeviceStream", torch.cuda.Stream(self.torch, priority=priority))


class DeviceWatch:
    """What `Device.watch` returns. A class, because each step on the device enters one."""

    __slots__ = ("_device", "_modes")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._modes: ExitStack | None = None

    def __enter__(self) -> None:
        device = self._device
        if device.lost:
            raise GpuLost(f"{device.name} failed before; queries are answered by the CPU until the process is started again")
        # Callers may be in inference mode, and what is made there could not be written outside of it.
        if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
            self._modes = ExitStack()
            self._modes.enter_context(torch.inference_mode(mode=False))
            self._modes.enter_context(torch.no_grad())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._modes is not None:
            self._modes.close()
        translated = _translated(self._device.name, error)
        if isinstance(translated, GpuLost) or isinstance(error, GpuLost):
            self._device.lost = True
        if translated is not None:
            raise translated from error


class CardStopwatch:
    """Measures by events of a card."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._used = False

    def start(self, stream: DeviceStream) -> None:
        self._began.record(cast("torch.cuda.Stream", stream))

    def stop(self, stream: DeviceStream) -> None:
        self._ended.record(cast("torch.cuda.Stream", stream))
        self._used = True

    def seconds(self) -> float:
        return self._began.elapsed_time(self._ended) / 1e3 if self._used else 0.0


def open_device(name: str) -> Device:
    """name: "cuda", "cuda:1", or "interpreter" for tensors of the CPU, with TRITON_INTERPRET=1 in the environment.

    Raises ConfigError for a name or a number that does not exist, and Unsupported, which says what is missing, where there is no
    card that kvdb can use.
    """
    interpreting = os.environ.get(INTERPRETED, "0") not in {"", "0"}
    if name == INTERPRETER:
        if not interpreting:
            raise ConfigError(
                f"storage.gpu_device is interpreter, which wants {INTERPRETED}=1 in the environment before kvdb is imported"
            )
        _check(name, None)
        pages = os.sysconf("SC_PHYS_PAGES")
        return Device(torch.device("cpu"), "Triton's interpreter", pages * os.sysconf("SC_PAGE_SIZE"))
    if not GPU_DEVICE.fullmatch(name):
        raise ConfigError(f"storage.gpu_device is {name!r}; expected cuda, cuda:0 and so on, or interpreter")
    _check(name, probe.find_driver())
    if interpreting:
        raise ConfigError(f"storage.gpu_device is {name} and {INTERPRETED} is set; unset it, or choose interpreter")
    where = torch.device("cuda", probe.device_index(name))
    with _failures(name):
        if not torch.cuda.is_available():
            raise Unsupported(
                f"torch {torch.__version__} finds no GPU that it can use; update the driver, or choose another torch"
            )
        cards = torch.cuda.device_count()
        if where.index >= cards:
            raise ConfigError(f"storage.gpu_device is {name}; expected a number below {cards}, how many there are")
        properties = torch.cuda.get_device_properties(where)
    return Device(where, properties.name, properties.total_memory)


@contextmanager
def _failures(name: str) -> Iterator[None]:
    """Raise CapacityError or GpuLost in place of what torch raises for a device."""
    try:
        yield
    except RuntimeError as error:
        translated = _translated(name, error)
        if translated is None:
            raise
        raise translated from error


def _translated(name: str, error: BaseException | None) -> CapacityError | GpuLost | None:
    """The error of ours that says what went wrong on a device; None for any other."""
    if not isinstance(error, RuntimeError) or not _of_the_device(error):
        return None
    said = str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY in said:
        return CapacityError(
            f"{name} has no memory left ({said}); lower storage.gpu_bytes_max, or end what else uses it, such as a model"
        )
    return GpuLost(f"{name} failed ({said}); what was in its memory is gone, and main memory has all of it")


def _check(name: str, driver: probe.Driver | None) -> None:
    if (missing := probe.missing_requirement(name, driver)) is not None:
        raise Unsupported(str(missing))


def _of_the_device(error: RuntimeError) -> bool:
    kinds = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))  # the latter since torch 2.8
    return isinstance(error, kinds) or DEVICE_ERRORS.search(str(error)) is not None
