"""Index builds on a device, as `indexes.accelerate` asks for them. One KV head is copied in while another is computed."""

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
from kvdb.gpu.device import Device
from kvdb.gpu.index_build.kmeans import cluster
from kvdb.gpu.index_build.knn import LENGTH_CHANNELS, KnnSearch, knn_search, largest_products, nearest_before
from kvdb.gpu.index_build.knn_choice import fastest_knn_search
from kvdb.gpu.streams import DeviceStream, ImmediateStream

log = logging.getLogger(__name__)
TILE_NBYTES = 512 << 20
"""Bytes of scores that are computed at once. A build also takes memory for what it selects from them, and for the keys of two KV
heads."""
MEMORY_SHARE = 16
"""A tile takes at most this fraction, 1 / MEMORY_SHARE, of the device's memory."""
REST_SECONDS = 60.0
"""How long builds stay on the CPU after the device had no memory left for one."""
Compute = Callable[..., torch.Tensor]
"""Takes the tensors of one KV head and returns int32 on the same device."""


class DeviceAccelerator:
    """An `indexes.accelerate.Accelerator`. Builds have streams of their own, so that queries do not wait behind them. Several
    threads may build at once, each in memory of its own.

    A device that fails or has no memory left is logged once. Builds then run on the CPU: for good, or for REST_SECONDS.
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
            return largest_products(keys, queries, k, self._tile_nbytes, self._search(dtype, keys.shape[1]))

        return self._each(heads, compute)

    def nearest_before(self, heads: Iterable[Array], k: int) -> Iterator[Int32]:
        """See `Accelerator.nearest_before`. Raises AcceleratorLost."""

        def compute(keys: torch.Tensor) -> torch.Tensor:
            return nearest_before(keys, k, self._tile_nbytes, self._search(keys.dtype, keys.shape[1] + LENGTH_CHANNELS))

        return self._each(((keys,) for keys in heads), compute)

    def clusters(self, heads: Iterable[Array], how: KMeans) -> Iterator[Clusters]:
        """See `Accelerator.clusters`. Raises AcceleratorLost."""

        def compute(keys: torch.Tensor) -> torch.Tensor:
            return cluster(keys.unflatten(0, (-1, how.tokens)), how, self._tile_nbytes)

        for clusters in self._each(((keys,) for keys in heads), compute):
            yield clusters.astype(np.uint16)

    def _search(self, dtype: torch.dtype, width: int) -> KnnSearch:
        return knn_search if self._device.interpreted else fastest_knn_search(self._device.torch, dtype, width)

    def _each(self, heads: Iterable[tuple[Array, ...]], compute: Compute) -> Iterator[Int32]:
        """The results of all KV heads in their order. The result of one is waited for when the next one has been launched."""
        if self._device.lost or monotonic() < self._resting_until:
            raise AcceleratorLost("the device is out of use, as was logged before")
        pending: deque[_PendingResult] = deque()
        try:
            for head in heads:
                with self._watch():
                    tensors = [self._copied_in(array) for array in head]
                    with self._device.on(self._working):
                        pending.append(_PendingResult(self._device, compute(*tensors), self._working))
                if len(pending) > 1:
                    yield self._finished(pending)
            while pending:
                yield self._finished(pending)
        finally:
            for result in pending:
                result.drop()

    def _finished(self, pending: "deque[_PendingResult]") -> Int32:
        with self._watch():
            return pending.popleft().array()

    def _copied_in(self, array: Array) -> torch.Tensor:
        """The array as a tensor on the device. The working stream waits until it has been copied."""
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

    def _stream(self) -> DeviceStream:
        return ImmediateStream() if self._device.interpreted else cast("DeviceStream", torch.cuda.Stream(self._device.torch))

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


class _PendingResult:
    """An int32 tensor on its way to main memory."""

    def __init__(self, device: Device, there: torch.Tensor, working: DeviceStream) -> None:
        """Launches the copy. The stream `working` is the current one."""
        self._device, self._working, self._shape = device, working, there.shape
        self._buffer = device.staging.take(there.nbytes)
        try:
            self._buffer.tensor.copy_(there.contiguous().view(-1).view(torch.uint8), non_blocking=True)
            self._event = working.record_event()
        except RuntimeError:
            self._buffer.unused()
            raise

    def array(self) -> Int32:
        """The result in main memory, once it is there."""
        try:
            self._event.synchronize()
            return self._buffer.array.view(np.int32).reshape(self._shape).copy()
        finally:
            self._buffer.unused()

    def drop(self) -> None:
        """Give the buffer back without waiting for the result."""
        if self._device.lost:
            self._buffer.unused()
        else:
            self._buffer.sent(self._working)
