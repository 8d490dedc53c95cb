"""Do the formulas of costs say what steps take, and would the kind that they call the cheapest be the right one?

    python -m benchmarks.cost [--tokens 16384 131072] [--workloads sharp diffuse] [--cache DIR] [--defaults]
    python -m benchmarks.cost --fit quantized

One JSON line for each length, workload, retrieval and kind: predicted and measured milliseconds of a decode step of a session,
behind an exact one that leaves caches cold. Then the summary: max(predicted / measured, measured / predicted), and how often what
is predicted to be cheapest, exact attention among it, is not within 10 % of the best. The machine is calibrated first.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

import benchmarks.cost_fit as cost_fit
from benchmarks.decoding import Decoding
from benchmarks.harness import argument_parser, report
from benchmarks.harness import machine as machine_facts
from benchmarks.kinds import USUAL, build
from benchmarks.layer import Layer
from benchmarks.workloads import Shape, Workload, generate
from indexes.base import Index
from indexes.retrieval import Dipr, Retrieval, TopK
from kvdb.hardware.calibrate import calibrate
from query_optimizer.cost import Machine

TOKENS = [4096, 8192, 16_384, 32_768, 65_536, 131_072]
RETRIEVALS: tuple[Retrieval, ...] = (*map(Dipr, (0.3, 0.05, 0.012, 0.003, 0.001)), *map(TopK, (16, 64, 256, 1024)))
SHARE_MAX = 1 / 4
"""The largest share of the tokens that a top-k retrieval asks for."""
NEAR = 1.1
WARM_UP = 2
EXACT = "exact"


@dataclass(frozen=True)
class Cell:
    """Predicted and measured seconds of each way to answer one retrieval on one workload."""

    workload: str
    tokens: int
    retrieval: Retrieval
    predicted: dict[str, float]
    measured: dict[str, float]

    @property
    def chosen(self) -> str:
        return min(self.predicted, key=self.predicted.__getitem__)

    @property
    def over_best(self) -> float:
        return self.measured[self.chosen] / min(self.measured.values())

    def error(self, kind: str) -> float:
        ratio = self.predicted[kind] / self.measured[kind]
        return max(ratio, 1 / ratio)


def main() -> None:
    given = arguments()
    report("machine", **machine_facts())
    started = time.perf_counter()
    machine = Machine() if given.defaults else calibrate().machine
    report("calibrated", seconds=time.perf_counter() - started, **machine.to_dict())
    if given.fit is not None:
        cost_fit.fit(machine)
        return
    cells = []
    for tokens in given.tokens:
        for name in given.workloads:
            cells += measured(generate(name, Shape(tokens, given.kv_heads), cache=given.cache), machine, given)
    summary(cells)


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths (default %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=USUAL, default=USUAL, help="indexes (default %(default)s)")
    parser.add_argument("--workloads", nargs="+", choices=["sharp", "diffuse"], default=["sharp", "diffuse"])
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads, each of 4 query heads (default 8)")
    parser.add_argument("--rounds", type=int, default=6, help="of which each takes another query (default 6)")
    parser.add_argument("--cache", type=Path, help="folder that keeps workloads and indexes")
    parser.add_argument("--fit", choices=cost_fit.KINDS, help="fit the constants of a kind to this machine, and nothing else")
    parser.add_argument("--defaults", action="store_true", help="predict by Machine's defaults, and calibrate nothing")
    return parser.parse_args()


def measured(workload: Workload, machine: Machine, given: argparse.Namespace) -> list[Cell]:
    layer = Layer(workload)
    indexes = {kind: build(kind, layer, given.cache).index for kind in given.kinds}
    queries = [layer.query(i % workload.queries.shape[1]) for i in range(given.rounds)]
    expected_tokens = wanted_tokens(layer, queries)
    cells = []
    for retrieval in RETRIEVALS:
        if isinstance(retrieval, TopK) and retrieval.k > SHARE_MAX * layer.tokens:
            continue
        seconds = timed(layer, indexes, queries, retrieval)
        predicted = {EXACT: exact_seconds(machine, layer)}
        for kind, index in indexes.items():
            predicted[kind] = step_seconds(machine, layer, index, retrieval, expected_tokens.get(retrieval))
        cells.append(Cell(workload.name, layer.tokens, retrieval, predicted, seconds))
        show(cells[-1], expected_tokens.get(retrieval))
    return cells


def wanted_tokens(layer: Layer, queries: list[np.ndarray]) -> dict[Retrieval, float]:
    """The mean number of tokens outside the window that each range holds."""
    q = np.concatenate(queries, axis=1).astype(np.float32)
    ranges = [retrieval for retrieval in RETRIEVALS if isinstance(retrieval, Dipr)]
    counts: dict[Retrieval, list[float]] = defaultdict(list)
    group = len(q) // layer.kv_heads
    for head in range(layer.kv_heads):
        scores = q[head * group : (head + 1) * group].reshape(-1, q.shape[2]) @ layer.blocks.keys(head).T
        top = scores.max(axis=1, keepdims=True)
        for retrieval in ranges:
            inside = scores[:, layer.begin : layer.end] >= top - retrieval.beta(layer.scale)
            counts[retrieval].append(float(inside.sum(axis=1).mean()))
    return {retrieval: float(np.mean(found)) for retrieval, found in counts.items()}


def timed(layer: Layer, indexes: dict[str, Index], queries: list[np.ndarray], retrieval: Retrieval) -> dict[str, float]:
    """Median seconds of a decode step of a session by each index, and of the exact ones between."""
    decoding = {kind: Decoding(layer, index, retrieval) for kind, index in indexes.items()}
    exact, seconds = Decoding(layer, None, retrieval), defaultdict[str, list[float]](list)
    for q in queries[:WARM_UP]:
        for one in (*decoding.values(), exact):
            one.step(q)
    for q in queries:
        for kind, own in decoding.items():
            seconds[EXACT].append(exact.step(q))
            seconds[kind].append(own.step(q))
    return {kind: median(spent) for kind, spent in seconds.items()}


def exact_seconds(machine: Machine, layer: Layer) -> float:
    rows, d = len(layer.workload.queries), layer.blocks.head_dim
    return machine.exact_seconds(layer.nbytes, 2.0 * rows * layer.tokens * d)


def step_seconds(machine: Machine, layer: Layer, index: Index, retrieval: Retrieval, expected_tokens: float | None) -> float:
    """Seconds of one step, as a plan estimates them."""
    heads, token_nbytes, visible = len(layer.workload.queries), layer.blocks.token_nbytes, layer.end - layer.begin
    cost = index.cost(visible, heads // layer.kv_heads, retrieval, expected_tokens=expected_tokens)
    found = min(retrieval.k, visible) if isinstance(retrieval, TopK) else expected_tokens or 0.0
    window = (layer.tokens - visible) * layer.kv_heads * token_nbytes
    values = found * heads * token_nbytes / 2
    search = machine.step_seconds(layer.nbytes) + machine.search_seconds(cost, values, layer.nbytes)
    return search + window / machine.stream_bytes_s + cost.given_up * exact_seconds(machine, layer)


def show(cell: Cell, expected_tokens: float | None) -> None:
    common = {"workload": cell.workload, "tokens": cell.tokens, "retrieval": str(cell.retrieval), "expected": expected_tokens}
    for kind, predicted in cell.predicted.items():
        ms = {"predicted_ms": 1e3 * predicted, "ms": 1e3 * cell.measured[kind]}
        report("cost", **common, kind=kind, **ms, ratio=predicted / cell.measured[kind])


def summary(cells: list[Cell]) -> None:
    for name, of in (("dipr", Dipr), ("top_k", TopK)):
        some = [cell for cell in cells if isinstance(cell.retrieval, of)]
        if not some:
            continue
        for kind in some[0].predicted:
            report("cost.error", retrieval=name, kind=kind, **spread([cell.error(kind) for cell in some]))
        report("cost.error", retrieval=name, kind="all", **spread([c.error(kind) for c in some for kind in c.predicted]))
        wrong = [cell for cell in some if cell.over_best > NEAR]
        report("cost.choice", retrieval=name, wrong=len(wrong), **spread([cell.over_best for cell in some]))
        for cell in sorted(wrong, key=lambda cell: -cell.over_best)[:8]:
            best = min(cell.measured, key=cell.measured.__getitem__)
            line = f"{cell.workload} {cell.tokens:,} {cell.retrieval}: {cell.chosen} takes {cell.over_best:.2f} of {best}"
            print(line, file=sys.stderr)


def spread(values: list[float]) -> dict[str, float | int]:
    ordered = sorted(values)
    return {
        "cells": len(ordered),
        "median": median(ordered),
        "p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
        "worst": ordered[-1],
    }


if __name__ == "__main__":
    main()
