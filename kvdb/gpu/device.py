"""One GPU, opened: where tensors live, in which order it works, and what its failures mean."""

import os
import re
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import cast

import torch

import kvdb.gpu.probe as probe
from kvdb.config import GPU_DEVICE
from kvdb.errors import CapacityError, ConfigError, GpuLost, Unsupported
from kvdb.gpu.staging import Staging
from kvdb.gpu.streams import Done, Stream

INTERPRETER = "interpreter"
INTERPRETED = "TRITON_INTERPRET"
FAILED = re.compile(r"CUDA error|\[CUDA\]|CUDA driver|cuda runtime error|C(UBLAS|UDNN|USOLVER)_STATUS|NVRTC")
"""In a RuntimeError of torch's or Triton's that a card, not a caller, has to answer for."""
SPENT = "out of memory"


class Device:
    """A card, or the CPU under Triton's interpreter. Thread-safe, but for what is launched on one stream by several threads.

    torch: where tensors live. card: what it is called. name: the same, and which one it is. memory_total: bytes. copy_stream,
    query_stream: blocks come in on one while queries are answered on the other, each in its own order; `queries_after_copies` and
    `copies_after_queries` put one behind the other on the device, without the host waiting. A tensor that was allocated on one
    stream and is used on the other must be told so, with `tensor.record_stream`, or be alive until both are done with it: its
    memory is given to the next who asks on its own stream as soon as the host lets go of it. staging: main memory to copy blocks
    from; query_staging: for queries and their results, apart, so that no query waits for blocks that come in. lost: whether it
    failed; from then on nothing is launched.
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
        # Of memory that `tracked` was told of, by where it begins. No lock: memory may go in the middle of anything, this too.
        self._tracked: dict[int, int] = {}

    @property
    def tracked_nbytes(self) -> int:
        """Of all tensors that `tracked` was told of and that are alive."""
        return sum(list(self._tracked.values()))

    @property
    def pinned_nbytes(self) -> int:
        """Of main memory, for copies."""
        return self.staging.nbytes + self.query_staging.nbytes

    def memory_free(self) -> int:
        """Bytes that nobody holds now, other processes included. Raises GpuLost."""
        if self.interpreted:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with self.watch():
            return int(torch.cuda.mem_get_info(self.torch)[0])

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around everything that allocates on, launches on or waits for the device.

        Raises CapacityError where its memory is spent, and the device goes on; GpuLost where it failed, or had failed before: a
        failed kernel leaves a process's CUDA context of no use. Other errors are bugs and stay what they are.
        """
        if self.lost:
            raise GpuLost(f"{self.name} failed before; queries are answered by the CPU until the process is started again")
        try:
            with _failures(self.name):
                yield
        except GpuLost:
            self.lost = True
            raise

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """What is allocated and launched inside goes to this stream."""
        if self.interpreted:
            return nullcontext()
        return torch.cuda.stream(cast("torch.cuda.Stream", stream))

    def queries_after_copies(self) -> None:
        """What is launched on query_stream from now on sees what copy_stream was given to copy so far. Raises GpuLost."""
        with self.watch():
            self.query_stream.wait_event(self.copy_stream.record_event())

    def copies_after_queries(self) -> None:
        """What copy_stream writes from now on is not seen by what query_stream was given so far. Raises GpuLost."""
        with self.watch():
            self.copy_stream.wait_event(self.query_stream.record_event())

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tracked tensor that both streams may use at once. Raises CapacityError or GpuLost."""
        with self.watch(), self.on(self.query_stream):
            tensor = torch.zeros(shape, dtype=dtype, device=self.torch)
            self.copies_after_queries()
        return self.tracked(tensor)

    def tracked(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, whose memory counts in `tracked_nbytes`, once, until the last tensor that uses it is gone."""
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        if begin and begin not in self._tracked:
            self._tracked[begin] = storage.nbytes()
            weakref.finalize(storage, self._tracked.pop, begin)
        return tensor

    def wait(self) -> None:
        """Wait on the host until queries that were launched are answered. Raises CapacityError or GpuLost."""
        with self.watch():
            self.query_stream.synchronize()

    def close(self) -> None:
        """Wait for all that is under way and give memory back that nothing uses. Tensors must be gone before. A device that is
        lost has given everything back."""
        with suppress(GpuLost), self.watch():
            self.copy_stream.synchronize()
            self.query_stream.synchronize()
            self.staging.close()
            self.query_staging.close()
            if not self.interpreted:
                torch.cuda.empty_cache()

    def _stream(self, priority: int = 0) -> Stream:
        return Done() if self.interpreted else cast("Stream", torch.cuda.Stream(self.torch, priority=priority))


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
    _check(name, probe.look())
    if interpreting:
        raise ConfigError(f"storage.gpu_device is {name} and {INTERPRETED} is set; unset it, or choose interpreter")
    where = torch.device("cuda", probe.number(name))
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
    """What torch raises for a device as CapacityError or GpuLost."""
    try:
        yield
    except RuntimeError as error:
        if not _of_the_device(error):
            raise
        said = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, torch.OutOfMemoryError) or SPENT in said:
            raise CapacityError(
                f"{name} has no memory left ({said}); lower storage.gpu_bytes_max, or end what else uses it, such as a model"
            ) from error
        raise GpuLost(f"{name} failed ({said}); what was in its memory is gone, and main memory has all of it") from error


def _check(name: str, driver: probe.Driver | None) -> None:
    if (missing := probe.missing(name, driver)) is not None:
        raise Unsupported(str(missing))


def _of_the_device(error: RuntimeError) -> bool:
    kinds = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))  # the latter since torch 2.8
    return isinstance(error, kinds) or FAILED.search(str(error)) is not None
