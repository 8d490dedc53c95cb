"""Pinned buffers of main memory, used again and again, that a GPU copies from and to while the host goes on."""

from collections import deque
from collections.abc import Callable
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from kvdb.gpu.streams import DeviceEvent, DeviceStream

BUFFERS = 4
"""Buffers that are kept. There are more only while more are held at once."""
BUFFER_BYTES_MIN = 1 << 16
Allocate = Callable[[int], torch.Tensor]


class Buffer:
    """A buffer of `nbytes` bytes, whose contents are undefined at first. array and tensor are the same bytes, uint8.

    Whoever took it gives it back once: with `sent` after launching a copy that reads or writes it, otherwise with `unused`. Used
    as a context manager it is given back in any case.
    """

    def __init__(self, staging: "Staging", whole: torch.Tensor, nbytes: int) -> None:
        self.tensor = whole[:nbytes]
        self.array: npt.NDArray[np.uint8] = self.tensor.numpy()
        self._staging = staging
        self._whole: torch.Tensor | None = whole

    def sent(self, stream: DeviceStream) -> None:
        """Give it back. It is used again when everything that was launched on the stream so far is done."""
        self._give(stream.record_event())

    def unused(self) -> None:
        """Give it back, to be used again at once."""
        self._give(None)

    def __enter__(self) -> "Buffer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._whole is not None:
            self.unused()

    def _give(self, event: DeviceEvent | None) -> None:
        assert self._whole is not None, "a buffer was given back twice"
        whole, self._whole = self._whole, None
        self._staging.give(whole, event)


class Staging:
    """Hands out buffers. Thread-safe.

    A buffer that copies still use is waited for only where BUFFERS of them are under way, so at most that many are ahead of the
    card. nbytes: of all buffers, to the byte. Their sizes are powers of two, as the allocator of pinned memory rounds to them.
    """

    def __init__(self, pinned: bool) -> None:
        """pinned: whether a card copies from the buffers, so that they must not be swapped out."""
        self._allocate: Allocate = _pinned if pinned else _plain
        self._free: list[torch.Tensor] = []
        self._under_way: deque[tuple[torch.Tensor, DeviceEvent]] = deque()
        self._lock = Lock()
        self.nbytes = 0

    def take(self, nbytes: int) -> Buffer:
        """A buffer of that size. Raises what the allocation raises; call it inside `Device.watch()`."""
        assert nbytes >= 0
        size = max(BUFFER_BYTES_MIN, 1 << max(nbytes - 1, 0).bit_length())
        with self._lock:
            self._collect()
            fitting = min((b for b in self._free if b.numel() >= size), key=torch.Tensor.numel, default=None)
            if fitting is not None:
                self._remove(fitting)
            elif len(self._under_way) >= BUFFERS:
                fitting = self._wait(size)
        return Buffer(self, self._fresh(size) if fitting is None else fitting, nbytes)

    def give(self, whole: torch.Tensor, event: DeviceEvent | None) -> None:
        """Take a buffer's memory back, to be used again after the event, or at once without one. Called by Buffer."""
        with self._lock:
            if event is None:
                self._free.append(whole)
            else:
                self._under_way.append((whole, event))
            self._collect()

    def close(self) -> None:
        """Wait for copies that are under way, and free all buffers that nobody holds."""
        with self._lock:
            while self._under_way:
                whole, event = self._under_way.popleft()
                event.synchronize()
                self._free.append(whole)
            self.nbytes -= sum(whole.numel() for whole in self._free)
            self._free.clear()

    def _fresh(self, size: int) -> torch.Tensor:
        whole = self._allocate(size)
        with self._lock:
            self.nbytes += size
        return whole

    def _wait(self, size: int) -> torch.Tensor | None:
        """The oldest buffer under way, once it is done; None where it is too small, and was freed."""
        whole, event = self._under_way.popleft()
        event.synchronize()
        if whole.numel() >= size:
            return whole
        self.nbytes -= whole.numel()
        return None

    def _collect(self) -> None:
        """Move buffers that are done to the free ones, of which the largest are kept."""
        while self._under_way and self._under_way[0][1].query():
            self._free.append(self._under_way.popleft()[0])
        self._free.sort(key=torch.Tensor.numel)
        while self._free and len(self._free) + len(self._under_way) > BUFFERS:
            self.nbytes -= self._free.pop(0).numel()

    def _remove(self, whole: torch.Tensor) -> None:
        self._free = [other for other in self._free if other is not whole]


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _plain(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)
