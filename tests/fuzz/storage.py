"""What the fuzzer of the native boundary does with `kvdb._native` beside attention: blocks are quantized, summed and read."""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import numpy as np

from tests.fuzz.values import Table, Trusted

PAGE = 4096


def use(rng: np.random.Generator, native: Any, geometry: Any, table: Table) -> list[Any]:
    """Calls as segments make them, of a run whose numbers are finite. Returns the memory that the calls' addresses are of."""
    sums = np.zeros(len(table), np.uint32)
    native.crc32c(table, Trusted(geometry.block_bytes), sums)
    symmetric = geometry.value_dim == geometry.head_dim and not geometry.values_in_keys
    kept = [quantized(rng, native, geometry, table)] if geometry.block_size % 16 == 0 and symmetric else []
    return [*kept, read(rng, native), paged(rng, native, geometry), rings(rng, native)]


def pages_of(count: int) -> tuple[Any, int]:
    """Memory of whole pages, and its address."""
    memory = np.frombuffer(mmap.mmap(-1, count * PAGE), np.uint8)
    return memory, memory.ctypes.data


def quantized(rng: np.random.Generator, native: Any, geometry: Any, table: Table) -> Any:
    """The run in eight or four bits; read again, and attended as it is."""
    block_format = list(native.BlockFormat)[rng.integers(1, 4)]
    nbytes = native.block_bytes(geometry, block_format)
    memory = np.zeros(len(table) * nbytes + 64, np.uint8)
    begin = -(-memory.ctypes.data // 64) * 64
    blocks = (begin + np.arange(len(table)) * nbytes).astype(np.uint64).view(Table)
    n = len(table) * geometry.block_size
    native.quantize(geometry, block_format, table, n, blocks)
    element = np.float32 if geometry.dtype == native.Dtype.float32 else np.uint16
    k, v = np.zeros((2, geometry.kv_heads, n, geometry.head_dim), element)
    native.dequantize(geometry, block_format, blocks, 0, n, k, v)
    native.cut(geometry, block_format, Trusted(blocks[0]), int(rng.integers(geometry.block_size + 1)), Trusted(blocks[-1]))
    q = np.ones((geometry.kv_heads * int(rng.integers(1, 4)), int(rng.choice([1, 3])), geometry.head_dim), element)
    counts = rng.integers(0, geometry.block_size + 1, len(table)).astype(np.int32)
    stored = (blocks | np.uint64(block_format.value)).view(Table)
    native.attend(geometry, q, stored, counts, 0, 0.1, np.zeros(q.shape, np.float32), np.zeros(q.shape[:2], np.float32))
    return memory


def rings(rng: np.random.Generator, native: Any) -> Any:
    """Both ends of a ring in one process, one of which is shown any bytes in the end. Both are stopped: no call waits."""
    region, _ = pages_of(-(-native.RING_BYTES // PAGE))
    client, server = native.SharedRing(region, False), native.SharedRing(region, True)
    for _ in range(int(rng.integers(1, 2 * native.RING_SLOTS))):
        if client.send(rng.bytes(128)) and rng.random() < 0.5:
            server.send(server.receive(0.0)[:64])
            client.receive(0.0)
    steps(rng, native, client, server)
    client.stop()
    server.stop()
    region[: 2 * PAGE] = np.frombuffer(rng.bytes(2 * PAGE), np.uint8)
    with suppress(ValueError):
        server.receive(0.0)
    return region


def steps(rng: np.random.Generator, native: Any, client: Any, server: Any) -> None:
    """Attends of one token from one end of a ring to the other, which knows some of them."""
    heads, head_dim, message = int(rng.integers(1, 4)), 8 * int(rng.integers(1, 5)), rng.bytes(int(rng.integers(0, 40)))
    value_dim, in_keys = 8 * int(rng.integers(1, head_dim // 8 + 1)), bool(rng.random() < 0.5)
    array, v = (rng.standard_normal((heads, 1, dim), np.float32) for dim in (head_dim, value_dim))
    arena, region_bytes = native.RING_BYTES, native.RING_BYTES + int(rng.choice([1 << 10, 1 << 16]))
    with suppress(ValueError):
        shape = heads, heads, head_dim, native.Dtype.float32
        step = native.SharedStep(*shape, array, message, arena, region_bytes, value_dim, in_keys)
        step.take_tensors(np.ndarray, array.dtype)
        calls = native.SharedCalls(server, int(rng.integers(3)))
        for number in range(int(rng.integers(1, 6))):
            start = [None, number, 1 << 63, "x"][rng.integers(4)]
            step.attend(client, int(rng.integers(3)), number, array, array, v[:1] if rng.random() < 0.1 else v, start, 1.0, 0.0)
            if isinstance(calls.receive(0.0), bytes) and rng.random() < 0.7:
                calls.learn(message, "known")
            if rng.random() < 0.5:
                calls.answer(int(rng.choice([0, array.nbytes, 1 << 40])), 1.0, 2.0, 3.0, int(rng.integers(9)))
            if rng.random() < 0.2:
                calls.forget()


def read(rng: np.random.Generator, native: Any) -> Any:
    """Pages of a file, in any order, some of them behind its end."""
    count = int(rng.integers(1, 40))
    data = rng.bytes(count * PAGE)
    memory, begin = pages_of(count)
    addresses = (begin + np.arange(count) * PAGE).astype(np.uint64).view(Table)
    offsets = rng.permutation(count).astype(np.uint64) * np.uint64(PAGE)
    way = list(native.ReadWay)[rng.integers(2)]

    def from_file(offsets: Any, addresses: Any, way: Any) -> None:
        with TemporaryFile() as file:
            file.write(data)
            file.flush()
            native.read_pages(file.fileno(), offsets, addresses, way)

    native.made(from_file, offsets, addresses, way)
    return memory


def paged(rng: np.random.Generator, native: Any, geometry: Any) -> Any:
    """A layer in a file, whose pages come and go, in any order of calls."""
    blocks = int(rng.integers(1, 4))
    pages = -(-blocks * geometry.block_bytes // PAGE)
    nbytes, whole = pages * PAGE, bool(rng.random() < 0.5)
    memory, begin = pages_of(pages)
    native.interleave(begin, nbytes)
    data = np.zeros(nbytes, np.uint8)
    unit, summed = (nbytes, geometry.block_bytes) if whole else (PAGE, PAGE)
    starts = (data.ctypes.data + np.arange(nbytes // summed) * summed).astype(np.uint64)
    sums = np.zeros(len(starts), np.uint32)
    native.crc32c(starts.view(Table), Trusted(summed), sums)
    table = (begin + np.arange(blocks) * geometry.block_bytes).astype(np.uint64).view(Table)
    element = np.float32 if geometry.dtype == native.Dtype.float32 else np.uint16
    shape = geometry.kv_heads, blocks * geometry.block_size
    k, v = (np.zeros((*shape, dim), element) for dim in (geometry.head_dim, geometry.value_dim))

    def come_and_go(
        begin: Any,
        nbytes: Any,
        unit: Any,
        file_nbytes: Any,
        at: Any,
        layer: Any,
        block_nbytes: Any,
        sum_nbytes: Any,
        sums: Any,
        limit: Any,
        gone: Any,
        order: Any,
        table: Any,
    ) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "layer"
            path.write_bytes(data.tobytes())
            pool = native.PagePool()
            pool.set_limit(limit)
            layer_pages = native.LayerPages(
                pool, begin, nbytes, unit, str(path), file_nbytes, at, layer, block_nbytes, sum_nbytes, sums
            )

            def all_of_it() -> None:
                if layer_pages.take_all():
                    layer_pages.read()

            def none_of_it() -> None:
                layer_pages.take_all()
                layer_pages.give_up()

            calls = [
                all_of_it,
                none_of_it,
                layer_pages.pin,
                layer_pages.unpin,
                layer_pages.discard,
                lambda: layer_pages.prefer(np.zeros(1, np.int32)),
                lambda: pool.shrink(gone),
                lambda: pool.set_limit(limit),
                lambda: native.gather(geometry, table, 0, k.shape[1], k, v),
                lambda: path.write_bytes(data[: len(data) // 2].tobytes()),
                lambda: (layer_pages.full, layer_pages.nbytes, layer_pages.missing_nbytes, pool.nbytes),
            ]
            try:
                for number in np.ravel(order).tolist():
                    with suppress(OSError):  # no room, or a file that became short
                        calls[int(number) % len(calls)]()
            finally:
                layer_pages.leave()

    order = rng.integers(0, 11, 12)
    numbers = len(data), 0, 3, geometry.block_bytes, summed, sums, len(data), int(rng.integers(0, 2 * nbytes)), order, table
    native.made(come_and_go, Trusted(begin), Trusted(nbytes), unit, *numbers)
    return [memory, data]
