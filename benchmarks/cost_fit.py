"""Fits what a kind of index says of its own costs to what it takes on this machine: `python -m benchmarks.cost --fit quantized`.

A search takes the time of its parts, so each constant is what an extra row, tile or found key adds to a search, in the units of
the cost model: multiplications and jumps, as the machine was calibrated just before. Samples are the lower quartile of rounds in
which all searches take turns behind an exact one, which leaves caches cold. The line `cost.fit` names the constants of
`indexes/<kind>/cost.py`, beside the bytes of a token, `cost.fit_error` how far the formula is off with them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

import indexes._native as _native
import indexes.quantized.cost as quantized_cost
from benchmarks.harness import report
from benchmarks.layer import Layer
from benchmarks.workloads import BFLOAT16, Workload
from indexes.base import Index, Queries
from indexes.quantized import Quantized
from indexes.retrieval import Retrieval, TopK, TopP
from query_optimizer.cost import Machine

Float64 = npt.NDArray[np.float64]
KINDS = ("quantized",)
TOKENS = (32_768, 131_072)
ROWS = (1, 2, 4, 8)
FEW, MANY, SORTED = TopK(64), TopK(1024), TopP(0.9)
KV_HEADS = 4
HEAD_DIM = 128
ROUNDS, BUILDS = 7, 3


@dataclass(frozen=True)
class Search:
    """One search that is timed: of `tokens` tokens by `rows` queries of each KV head."""

    tokens: int
    rows: int
    retrieval: Retrieval


def fit(machine: Machine) -> None:
    """Measure the kind, and report its constants."""
    seconds: dict[Search, float] = {}
    exact, builds, nbytes = {}, [], []
    for tokens in TOKENS:
        layer, keys = _layer(tokens), tokens * KV_HEADS * HEAD_DIM
        index: Index = Quantized.build(layer.blocks)
        for _ in range(BUILDS):
            started = time.perf_counter()
            index = Quantized.build(layer.blocks)
            builds.append((time.perf_counter() - started) / keys)
        nbytes.append(index.nbytes / (tokens * KV_HEADS))
        exact[tokens], found = _timed(layer, index)
        seconds |= found
    constants = _constants(machine, seconds)
    few = [seconds[Search(tokens, 4, FEW)] / exact[tokens] for tokens in TOKENS]
    report(
        "cost.fit",
        kind="quantized",
        **constants,
        BUILD_SECONDS=median(builds),
        SEARCH_SHARE=median(few),
        token_nbytes=median(nbytes),
    )
    for name, value in constants.items():
        setattr(quantized_cost, name, value)
    for search, measured in seconds.items():
        ratio = _predicted(machine, layer, search) / measured
        common = {"tokens": search.tokens, "rows": search.rows, "retrieval": str(search.retrieval)}
        report("cost.fit_error", kind="quantized", **common, ms=1e3 * measured, ratio=ratio)


def _layer(tokens: int) -> Layer:
    """A layer of heads that look for nothing in particular; codes take as long over any others."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((KV_HEADS, tokens, HEAD_DIM), np.float32).astype(BFLOAT16) for _ in range(2))
    q = rng.standard_normal((KV_HEADS * max(ROWS), ROUNDS, HEAD_DIM), np.float32)
    return Layer(Workload("normal", k, v, q, q[:, :0]))


def _timed(layer: Layer, index: Index) -> tuple[float, dict[Search, float]]:
    """Seconds of an exact answer for four rows, and of each search."""
    searches = [Search(layer.tokens, rows, FEW) for rows in ROWS]
    searches += [Search(layer.tokens, 4, MANY), Search(layer.tokens, 4, SORTED)]
    samples: dict[Search, list[float]] = defaultdict(list)
    exact = []
    for number in range(ROUNDS):
        q = layer.query(number)
        for search in searches:
            started = time.perf_counter()
            layer.exact(q)
            exact.append(time.perf_counter() - started)
            rows = q.reshape(layer.kv_heads, max(ROWS), -1)[:, : search.rows].reshape(layer.kv_heads * search.rows, 1, -1)
            queries = Queries.of(np.ascontiguousarray(rows), layer.kv_heads, layer.scale, layer.tokens)
            started = time.perf_counter()
            index.search(queries, search.retrieval, estimate_tail=True)
            samples[search].append(time.perf_counter() - started)
    return _quartile(exact), {search: _quartile(spent) for search, spent in samples.items()}


def _constants(machine: Machine, seconds: Mapping[Search, float]) -> dict[str, float]:
    """The constants of `indexes.quantized.cost` that say what these searches took."""
    cost = quantized_cost
    equations, right = [], []
    for search in (Search(tokens, rows, FEW) for tokens in TOKENS for rows in ROWS):
        scanned, tiles = KV_HEADS * search.tokens, -(-search.rows // cost.TILE)
        known = machine.search_s + scanned * tiles * cost.token_nbytes(HEAD_DIM) / machine.stream_bytes_s
        known += _jumps(search, 64) * cost.FOUND_JUMPS * machine.jump_s
        unit = scanned * HEAD_DIM / 128 / machine.operations_s
        equations.append([unit * tiles / seconds[search], unit * search.rows / seconds[search]])
        right.append((seconds[search] - known) / seconds[search])
    tile, row = _least_squares(np.array(equations), np.array(right))
    found, ordered = [], []
    for tokens in TOKENS:
        few, many, by_mass = (Search(tokens, 4, retrieval) for retrieval in (FEW, MANY, SORTED))
        jumps = _jumps(many, 1024) - _jumps(few, 64)
        found.append((seconds[many] - seconds[few]) / (jumps * machine.jump_s))
        ordered.append((seconds[by_mass] - seconds[few]) * machine.operations_s / (KV_HEADS * tokens * 4))
    return {
        "TILE_OPERATIONS": tile,
        "ROW_OPERATIONS": row,
        "FOUND_JUMPS": max(median(found), 0.0),
        "SORTED_OPERATIONS": max(median(ordered), 0.0),
    }


def _least_squares(equations: Float64, right: Float64) -> tuple[float, float]:
    """The two numbers, neither below 0, with which the equations hold best."""
    both = np.linalg.lstsq(equations, right, rcond=None)[0]
    if both.min() >= 0:
        return float(both[0]), float(both[1])
    alone = np.maximum(equations.T @ right / (equations**2).sum(axis=0), 0)
    left = [((right - equations[:, one] * alone[one]) ** 2).sum() for one in range(2)]
    return (float(alone[0]), 0.0) if left[0] < left[1] else (0.0, float(alone[1]))


def _jumps(search: Search, k: int) -> float:
    """The keys that a search for the k largest reads, on each thread."""
    return KV_HEADS * search.rows * quantized_cost.CANDIDATES * k / _native.threads()


def _predicted(machine: Machine, layer: Layer, search: Search) -> float:
    cost = quantized_cost.of(layer.blocks, search.tokens, search.rows, KV_HEADS, search.retrieval, None)
    return machine.search_s + machine.seconds(cost)


def _quartile(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 4]
