"""Builds of indexes on a device: what `indexes.accelerate` asks for, one KV head copied in while another is computed."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import cast

import numpy as np
import torch

from indexes.accelerate import AcceleratorLost, Array, Clusters, Int32, KMeans
from kvdb.errors import CapacityError, GpuLost
from kvdb.gpu.clusters import cluster
from kvdb.gpu.contest import fastest_search
from kvdb.gpu.device import Device
from kvdb.gpu.neighbours import EXTRA, Search, largest, nearest_before, search
from kvdb.gpu.streams import Done, Stream

log = logging.getLogger(__name__)
TILE_NBYTES = 512 << 20
"""Of scores that are computed at once. Beside them a build takes memory for what it selects from them, and two KV heads' keys."""
MEMORY_SHARE = 16
"""Of the device's memory, a tile takes one part in so many at most."""
REST_SECONDS = 60.0
"""How long builds leave the device alone whose memory did not do for one."""
Compute = Callable[..., torch.Tensor]
"""Of the tensors of one KV head: int32, on the same device."""


class DeviceAccelerator:
    """An `indexes.accelerate.Accelerator`. Builds have streams of their own, so that queries do not wait behind them. Several
    threads may build at once, each in memory of its own.

    Where the device fails or has no memory left, that is logged once, and builds go on without it: for good, or for REST_SECONDS.
    """

    def __init__(self, device: Device, tile_nbytes: int = TILE_NBYTES) -> None:
        self._device = device
        self._tile_nbytes = min(tile_nbytes, device.memory_total // MEMORY_SHARE)
        self._resting_until = -math.inf
        with device.watch():
            self._copying, self._working = self._stream(), self._stream()

    def neighbours(self, heads: Iterable[tuple[Array, Array]], k: int) -> Iterator[Int32]:
        """See `Accelerator.neighbours`. Raises AcceleratorLost."""

        def compute(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
            dtype = keys.dtype if keys.dtype == queries.dtype else torch.float32
            return largest(keys, queries, k, self._tile_nbytes, self._search(dtype, keys.shape[1]))

        return self._each(heads, compute)

    def nearest_before(self, heads: Iterable[Array], k: int) -> Iterator[Int32]:
        """See `Accelerator.nearest_before`. Raises AcceleratorLost."""

        def compute(keys: torch.Tensor) -> torch.Tensor:
            return nearest_before(keys, k, self._tile_nbytes, self._search(keys.dtype, keys.shape[1] + EXTRA))

        return self._each(((keys,) for keys in heads), compute)

    def clusters(self, heads: Iterable[Array], how: KMeans) -> Iterator[Clusters]:
        """See `Accelerator.clusters`. Raises AcceleratorLost."""

        def compute(keys: torch.Tensor) -> torch.Tensor:
            return cluster(keys.unflatten(0, (-1, how.tokens)), how, self._tile_nbytes)

        for found in self._each(((keys,) for keys in heads), compute):
            yield found.astype(np.uint16)

    def _search(self, dtype: torch.dtype, width: int) -> Search:
        return search if self._device.interpreted else fastest_search(self._device.torch, dtype, width)

    def _each(self, heads: Iterable[tuple[Array, ...]], compute: Compute) -> Iterator[Int32]:
        """What is launched for one KV head is waited for when the next one is launched."""
        if self._device.lost or monotonic() < self._resting_until:
            raise AcceleratorLost("the device is out of use; it was said why")
        under_way: deque[_Result] = deque()
        try:
            for head in heads:
                with self._watch():
                    tensors = [self._copied_in(array) for array in head]
                    with self._device.on(self._working):
                        under_way.append(_Result(self._device, compute(*tensors), self._working))
                if len(under_way) > 1:
                    yield self._finished(under_way)
            while under_way:
                yield self._finished(under_way)
        finally:
            for left in under_way:
                left.drop()

    def _finished(self, under_way: "deque[_Result]") -> Int32:
        with self._watch():
            return under_way.popleft().array()

    def _copied_in(self, array: Array) -> torch.Tensor:
        """A tensor of the same numbers. What is launched to compute with it begins when it has been copied."""
        device, copying, whole = self._device, self._copying, np.ascontiguousarray(array)
        with device.staging.take(whole.nbytes) as buffer:
            np.copyto(buffer.array, whole.view(np.uint8).reshape(-1))
            with device.on(copying):
                there = torch.empty(whole.nbytes, dtype=torch.uint8, device=device.torch)
                there.copy_(buffer.tensor, non_blocking=True)
            buffer.sent(copying)
        self._working.wait_event(copying.record_event())
        if not device.interpreted:
            there.record_stream(cast("torch.cuda.Stream", self._working))
        return there.view(getattr(torch, array.dtype.name)).view(array.shape)

    def _stream(self) -> Stream:
        return Done() if self._device.interpreted else cast("Stream", torch.cuda.Stream(self._device.torch))

    @contextmanager
    def _watch(self) -> Iterator[None]:
        try:
            with self._device.watch():
                yield
        except (CapacityError, GpuLost) as error:
            if isinstance(error, CapacityError):
                self._resting_until = monotonic() + REST_SECONDS
            log.warning("indexes are built on the CPU: %s", error)
            raise AcceleratorLost(str(error)) from error


class _Result:
    """int32, on its way to main memory."""

    def __init__(self, device: Device, there: torch.Tensor, working: Stream) -> None:
        """Called where what is launched goes to `working`."""
        self._device, self._working, self._shape = device, working, there.shape
        self._buffer = device.staging.take(there.nbytes)
        try:
            self._buffer.tensor.copy_(there.contiguous().view(-1).view(torch.uint8), non_blocking=True)
            self._event = working.record_event()
        except RuntimeError:
            self._buffer.unused()
            raise

    def array(self) -> Int32:
        """Waits for it."""
        try:
            self._event.synchronize()
            return self._buffer.array.view(np.int32).reshape(self._shape).copy()
        finally:
            self._buffer.unused()

    def drop(self) -> None:
        """Nobody wants it any more."""
        if self._device.lost:
            self._buffer.unused()
        else:
            self._buffer.sent(self._working)
