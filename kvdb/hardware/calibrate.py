"""Measures in less than a second how fast this machine is: the numbers that turn costs into seconds.

Each number is the lower quartile of a few samples, because other work on the machine can only make a sample longer.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

import indexes._native as _index_native
import indexes.registry as registry
import kvdb._native as _native
import kvdb.hardware.kernels as kernels
from indexes.base import Queries
from indexes.retrieval import Dipr, TopK
from kvdb.attention.block_run import BlockRun, Span
from kvdb.attention.partition import RunPartition, SearchedSpan
from kvdb.attention.query import AttentionQuery
from kvdb.attention.step import prepared_step
from kvdb.config import StorageConfig
from kvdb.hardware.kernels import KernelTimes
from kvdb.storage.store import BlockStore
from kvdb.types import ModelSpec, bits
from query_optimizer.cost import Machine
from query_optimizer.query_options import QueryOptions

SPEC = ModelSpec("calibration", layers=1, q_heads=32, kv_heads=8, head_dim=128)
TOKENS = 32_768
"""128 MiB of keys and values: more than caches hold."""
CACHED_TOKENS = 4096
CODED_TOKENS, PAGED_TOKENS = 2048, 16_384
PIECE = 1024
SAMPLES, SAMPLES_MIN, SAMPLES_LATE = 9, 3, 2
BUDGET_S, ALL_S, KERNELS_S = 0.05, 0.9, 0.15
"""After BUDGET_S seconds of one measurement, SAMPLES_MIN samples suffice; after ALL_S seconds of all together, SAMPLES_LATE
do. KERNELS_S are spent on choosing kernels."""
ROWS = 16
"""The number of queries of each head, enough that multiplying takes longer than reading."""
TILE_QUERIES = 4
"""The number of queries whose rows of a KV head are as many as a matrix tile has."""
CACHE_BYTES_MIN = float(1 << 20)
STEP_SHARE_MIN = 0.2
"""The least share of a step's time outside of its search; a smaller one is noise."""
LEAST = 1e-7
"""The least time in seconds; a smaller measurement is noise."""


BUSY_LOAD = 0.5
"""A machine with a higher load for each CPU is busy: its numbers are kept only where there are no others."""


def current_load() -> float:
    """The number of processes that wanted each CPU in the last minute; 0 where the system does not tell."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


@dataclass(frozen=True)
class Calibration:
    """What was measured. machine: with the fastest kernels. kernels: what each operation takes with each that it may use."""

    machine: Machine
    kernels: KernelTimes


def calibrate() -> Calibration:
    """Measure this machine, and use the fastest kernels from now on. Takes 128 MiB while it runs. Raises CapacityError."""
    collecting = gc.isenabled()
    gc.disable()
    store = BlockStore(StorageConfig())
    try:
        measuring = _CpuMeasuring(store)
        times = kernels.measure(measuring.kernel_calls(), KERNELS_S)
        kernels.use(times)
        return Calibration(measuring.machine(), times)
    finally:
        store.close()
        if collecting:
            gc.enable()


class _CpuMeasuring:
    """Times calls of the kernels on one layer of a model."""

    def __init__(self, store: BlockStore) -> None:
        self._ends = perf_counter() + ALL_S
        self._rng = np.random.default_rng(0)
        (self._table,), (self._tail,) = store.tables(SPEC), store.tables(SPEC)
        piece = self._random(SPEC.kv_heads, PIECE)
        for _ in range(TOKENS // PIECE):
            self._table.append(piece, piece)
        self._run = BlockRun([(self._table, TOKENS)], self._tail)
        self._layout = self._table.layout

    def kernel_calls(self) -> dict[str, Callable[[], object]]:
        """A call for each operation that its kernels spend nearly all the time of."""
        one, many = self._random(SPEC.q_heads, 1), self._random(SPEC.q_heads, ROWS)
        index = registry.build("quantized", self._table.keys(CODED_TOKENS))
        queries = Queries.of(one, SPEC.kv_heads, SPEC.softmax_scale, CODED_TOKENS)
        pages = registry.build("coarse-bounds", self._table.keys(PAGED_TOKENS))
        tiled = Queries.of(self._random(SPEC.q_heads, TILE_QUERIES), SPEC.kv_heads, SPEC.softmax_scale, PAGED_TOKENS)
        tiled = replace(tiled, floor=np.full_like(tiled.floor, 1e9))  # so that pages are scored, and none is read
        values, keys = self._gather_values(128), self._score_keys(128)

        def scan() -> None:
            index.search(queries, TopK(1))
            pages.search(tiled, Dipr())

        def gather() -> None:
            values()
            keys()

        return {
            "decode": lambda: self._attend(TOKENS // 4, one),
            "prefill": lambda: self._attend(PIECE, many),
            "scan": scan,
            "gather": gather,
        }

    def machine(self) -> Machine:
        call_s = self._attend_s(self._layout.block_size)
        half_s, all_s = self._attend_s(TOKENS // 2), self._attend_s(TOKENS)
        nbytes = float(TOKENS * self._layout.token_nbytes)
        mixed = nbytes / max(all_s - call_s, LEAST)  # up to half of the bytes may come out of caches
        stream = min(max(nbytes / 2 / max(all_s - half_s, LEAST), mixed / 1.5), mixed)
        cached_s = max(self._attend_s(CACHED_TOKENS) - call_s, LEAST)
        cached = max(CACHED_TOKENS * self._layout.token_nbytes / cached_s, stream)
        window_s, step_s, search_s = self._step()
        return Machine(
            stream_bytes_s=stream,
            cached_bytes_s=cached,
            cache_bytes=_cache_bytes(nbytes, max(all_s - call_s, LEAST), stream, cached),
            operations_s=self._operations(),
            jump_s=self._jump(),
            gather_bytes_s=self._gather(),
            exact_call_s=call_s,
            step_s=max(step_s - search_s - window_s, step_s * STEP_SHARE_MIN),
            search_s=search_s,
        )

    def _attend_s(self, tokens: int, queries: int = 1) -> float:
        q = self._random(SPEC.q_heads, queries)
        return self._seconds(lambda: self._attend(tokens, q))

    def _attend(self, tokens: int, q: np.ndarray) -> None:
        blocks = slice(tokens // self._layout.block_size)
        run, out, lse = self._run, np.empty(q.shape, q.dtype), np.empty(q.shape[:2], np.float32)
        _native.attend(
            self._layout.native, bits(q), run.addresses[blocks], run.counts[blocks], 0, SPEC.softmax_scale, bits(out), lse
        )

    def _operations(self) -> float:
        """Multiplications a second, for so many queries that memory does not matter."""
        count = 2.0 * ROWS * SPEC.q_heads * PIECE * SPEC.head_dim
        return count / self._attend_s(PIECE, ROWS)

    def _jump(self) -> float:
        """Seconds that one core takes to read a key that is in no cache."""
        count = 1024
        return self._cold(self._score_keys(count)) * _native.threads() / (SPEC.kv_heads * count)

    def _score_keys(self, count: int) -> Callable[[], None]:
        """A call that scores `count` random keys of each KV head."""
        rows = SPEC.kv_heads
        ids, offsets = self._picked(rows, count)
        queries = Queries.of(self._random(rows, 1), rows, SPEC.softmax_scale, TOKENS)
        keys, scores = self._table.keys(TOKENS).native, np.empty(len(ids), np.float32)
        return lambda: _index_native.score(keys, queries.native, offsets, ids, scores)

    def _gather(self) -> float:
        """Bytes a second of values at scattered places."""
        count = 128
        spent = self._cold(self._gather_values(count))
        return SPEC.q_heads * count * self._layout.token_nbytes / (2 * SPEC.kv_heads) / spent

    def _gather_values(self, count: int) -> Callable[[], None]:
        """A call that attends to the values of `count` random tokens for each query head."""
        ids, offsets = self._picked(SPEC.q_heads, count)
        shape = (SPEC.q_heads, 1, SPEC.head_dim)
        out, lse = np.zeros(shape, np.float32), np.zeros(shape[:2], np.float32)
        hits = offsets, ids, np.zeros(len(ids), np.float32), SPEC.softmax_scale
        return lambda: _native.attend_retrieved(self._layout.native, self._run.addresses, *hits, out, lse, out, lse)

    def _step(self) -> tuple[float, float, float]:
        """Three times in seconds: that of reading a window, of a decode step by native code whose index has next to nothing to
        search, and of that search alone."""
        size = self._layout.block_size
        window, index = 8 * size, registry.build("flat", self._table.keys(size))
        run, retrieval = BlockRun([(self._table, window)], self._tail), Dipr(1.0)
        q, k, options = self._random(SPEC.q_heads, 1), self._random(SPEC.kv_heads, 1), QueryOptions(retrieval)
        self._tail.append(k, k)
        run.refresh(0)
        query = AttentionQuery(self._layout, run, q, SPEC.softmax_scale, options)
        made = prepared_step(query, RunPartition([SearchedSpan(index, Span(0, size, 0))], size), retrieval)
        like = np.empty(0, SPEC.numpy_dtype)
        steps = _native.LayerSteps(self._layout.native, SPEC.q_heads, SPEC.softmax_scale, like)
        steps.follow(options, made.native, *run.arrays, run.blocks, None, run.tokens, size - 1, [])
        searched: list[int] = []
        step_s = self._cold(lambda: steps.step(q, k, k, options, None))
        self._cold(lambda: searched.append(made.run(query, [0], causal=False).searches[0][0].ns))
        return self._cold(lambda: self._attend(window - size, q)), step_s, sorted(searched)[len(searched) // 4] * 1e-9

    def _cold(self, run: Callable[[], object]) -> float:
        """Seconds of a call right after everything was read, so that caches hold what other layers of a model would leave."""
        q = self._random(SPEC.q_heads, 1)
        return self._seconds(run, lambda: self._attend(TOKENS, q))

    def _seconds(self, run: Callable[[], object], before: Callable[[], object] | None = None) -> float:
        """Seconds that a call takes, after one that warms up. before: runs before each call, untimed."""
        run()
        samples: list[float] = []
        ends = perf_counter() + BUDGET_S
        while True:
            if before is not None:
                before()
            begin = perf_counter()
            run()
            now = perf_counter()
            samples.append(now - begin)
            enough = SAMPLES if now < ends else SAMPLES_MIN if now < self._ends else SAMPLES_LATE
            if len(samples) >= enough:
                return max(sorted(samples)[len(samples) // 4], LEAST)

    def _picked(self, rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Random tokens for each row, ascending: ids int32 `[rows * count]` and offsets int64 `[rows + 1]`."""
        drawn = np.sort([self._rng.choice(TOKENS, count, replace=False, shuffle=False) for _ in range(rows)], axis=1)
        return drawn.astype(np.int32).reshape(-1), np.arange(rows + 1, dtype=np.int64) * count

    def _random(self, heads: int, tokens: int) -> np.ndarray:
        return self._rng.standard_normal((heads, tokens, SPEC.head_dim), np.float32).astype(SPEC.numpy_dtype)


def _cache_bytes(nbytes: float, seconds: float, stream: float, cached: float) -> float:
    """How many of `nbytes` bytes must have come out of caches if they were read in `seconds`; at most half. stream, cached: bytes
    per second out of memory and out of caches."""
    saved = nbytes / stream - seconds
    rate = 1 / stream - 1 / cached
    held = saved / rate if rate > 0 else 0.0
    return min(max(held, CACHE_BYTES_MIN), nbytes / 2)
