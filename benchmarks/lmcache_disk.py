"""LMCache's disk backend over tensors on the CPU: a competitor of `benchmarks.storage`, where its package is installed.

It writes a file for each 256 tokens of all layers, through the page cache, from four threads, and syncs none of them; the sync
is this file's, and is timed, as an import is synced.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import numpy as np

import kvdb.storage.direct_io as direct_io

CHUNK_TOKENS = 256
"""Its default."""
POLL_SECONDS = 1e-3


class NotInstalled(Exception):
    """LMCache's disk backend cannot be imported here; the message says why."""


class DiskBackend:
    """An `LMCache` `LocalDiskBackend` of a context. layers: keys and values `[kv_heads, tokens, head_dim]`, of 16 bits."""

    def __init__(self, folder: Path, layers: list[tuple[np.ndarray, np.ndarray]], loop: asyncio.AbstractEventLoop) -> None:
        self._folder = folder
        v1, self._torch = "lmcache.v1.", importlib.import_module("torch")
        self._formats = importlib.import_module(v1 + "memory_management").MemoryFormat
        self._key = importlib.import_module("lmcache.utils").CacheEngineKey
        kv_heads, tokens, head_dim = layers[0][0].shape
        self._shape = self._torch.Size([2, len(layers), CHUNK_TOKENS, kv_heads * head_dim])
        self._chunks, nbytes = tokens // CHUNK_TOKENS, sum(k.nbytes + v.nbytes for k, v in layers)
        allocator = importlib.import_module(v1 + "memory_allocators.host_memory_allocator").HostMemoryAllocator(2 * nbytes)
        config = importlib.import_module(v1 + "config").LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS, local_cpu=False, local_disk=str(folder), max_local_disk_size=2 * nbytes / (1 << 30) + 1
        )
        backends = v1 + "storage_backend."
        memory = importlib.import_module(backends + "local_cpu_backend").LocalCPUBackend(config, None, memory_allocator=allocator)
        module = importlib.import_module(backends + "local_disk_backend")
        self._backend: Any = module.LocalDiskBackend(config, loop, memory, "cpu")
        self._filled = [self._fill(memory, layers, chunk) for chunk in range(self._chunks)]
        self._touch(memory)

    def _fill(self, memory: Any, layers: list[tuple[np.ndarray, np.ndarray]], chunk: int) -> Any:
        """Tokens of all layers as it holds them in memory; that an engine has to bring them there is not timed."""
        made = memory.allocate(self._shape, self._torch.bfloat16, self._formats.KV_2LTD)
        out = made.tensor.view(self._torch.int16).numpy()
        part = slice(chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS)
        for layer, pair in enumerate(layers):
            for which, array in enumerate(pair):
                out[which, layer] = array[:, part].view(np.int16).transpose(1, 0, 2).reshape(CHUNK_TOKENS, -1)
        return made

    def _touch(self, memory: Any) -> None:
        """Write to the memory that it will read into, and give it back to it: none of it is found only while it is timed."""
        spare = [memory.allocate(self._shape, self._torch.bfloat16, self._formats.KV_2LTD) for _ in range(self._chunks)]
        for one in spare:
            one.tensor.fill_(1)
            one.ref_count_down()

    def key(self, chunk: int) -> Any:
        return self._key("storage", 1, 0, chunk, self._torch.bfloat16)

    def save(self) -> None:
        """Write everything; returns when the backend says that it is there, and it has reached the disk and lies in no cache."""
        keys = [self.key(chunk) for chunk in range(self._chunks)]
        self._backend.batched_submit_put_task(keys, self._filled)
        while not all(self._backend.contains(key) and not self._backend.exists_in_put_tasks(key) for key in keys):
            sleep(POLL_SECONDS)
        for path in self._folder.rglob("*"):
            if path.is_file():
                with direct_io.open_file(path, os.O_RDWR, direct=False) as file:
                    direct_io.sync(file)

    def load(self) -> int:
        """Read everything into its memory. Returns how many of the pieces came."""
        found = self._backend.batched_get_blocking([self.key(chunk) for chunk in range(self._chunks)])
        came = sum(one is not None for one in found)
        for one in found:
            if one is not None:
                one.ref_count_down()
        return came

    def holds(self, chunk: int) -> bool:
        """Whether a piece that is read has the bytes that were written."""
        (one,) = self._backend.batched_get_blocking([self.key(chunk)])
        right = one is not None and bool((one.tensor == self._filled[chunk].tensor).all())
        if one is not None:
            one.ref_count_down()
        return right

    def close(self) -> None:
        for one in self._filled:
            one.ref_count_down()
        self._backend.close()


@contextmanager
def opened(folder: Path, layers: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[DiskBackend]:
    """A backend in a folder, and the loop that it wants. Raises NotInstalled."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    try:
        backend = DiskBackend(folder, layers, loop)
    except ImportError as error:
        loop.close()
        raise NotInstalled(str(error)) from None
    thread.start()
    try:
        yield backend
    finally:
        backend.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
