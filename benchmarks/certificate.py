"""Does the bound on the missed mass hold, and how tight is it? `python -m benchmarks.retrieve --certificate 100000`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness import report
from benchmarks.kinds import build
from benchmarks.layer import Layer
from benchmarks.workloads import Shape, Workload, generate
from indexes.base import Queries
from indexes.oracle import Oracle
from indexes.retrieval import Dipr, Retrieval, TopK, TopP

TOKENS, VAULT_TOKENS = 4096, 8192
STEPS = 64
"""Queries of a head in one search."""
NOTABLE = 1e-6
"""Missed shares of the softmax mass below this matter to nobody; the ratio of bound and truth is also told without them."""


def run(queries: int, kinds: list[str], cache: Path | None) -> None:
    """`queries` rows, half sharp and diffuse, half of the trained model where it is at hand; every kind answers all of them."""
    layers = [Layer(workload) for workload in _workloads(cache)]
    rows = {layer.workload.name: -(-queries // len(layers)) for layer in layers}
    for kind in kinds:
        everything = [part for layer in layers for part in _certify(kind, layer, rows[layer.workload.name], cache)]
        missed, bound, share, holds = (np.concatenate(parts) for parts in zip(*everything, strict=True))
        some = missed > -np.inf
        notable = some & (share > NOTABLE)
        with np.errstate(over="ignore"):
            ratio = np.exp(bound - missed)
        report(
            "retrieve.certificate",
            kind=kind,
            queries=len(missed),
            workloads=list(rows),
            violations=int(np.count_nonzero(~holds)),
            missed_nothing=int(np.count_nonzero(~some)),
            bound_over_truth_median=float(np.median(ratio[some])),
            notable=int(notable.sum()),
            bound_over_truth_median_notable=float(np.median(ratio[notable])) if notable.any() else 1.0,
            bound_over_truth_90th_percentile_notable=float(np.quantile(ratio[notable], 0.9)) if notable.any() else 1.0,
            unknown=int(np.count_nonzero(np.isposinf(bound))),
        )


def _workloads(cache: Path | None) -> list[Workload]:
    made = [generate(kind, Shape(TOKENS), STEPS, query_samples=64, cache=cache) for kind in ("sharp", "diffuse")]
    from benchmarks.traces import record  # needs torch and transformers

    return made + record(VAULT_TOKENS, STEPS, query_samples=64, cache=cache)


def _certify(
    kind: str, layer: Layer, rows: int, cache: Path | None
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Logs of missed mass and bound, the share that was missed and whether the bound holds, of `rows` random queries or more."""
    chance = np.random.default_rng(layer.tokens)
    index = build(kind, layer, cache).index
    heads, parts = layer.workload.queries.shape[0], []
    for _ in range(-(-rows // (heads * STEPS))):
        queries = _random(layer, chance)
        oracle = Oracle(layer.blocks, queries, layer.window if chance.random() < 0.7 else (0, 0))
        retrieval = _retrieval(chance)
        found = index.search(oracle.queries, retrieval, tight=bool(chance.random() < 0.5))
        missed, holds = oracle.certify(found)
        parts.append((missed, found.missed_bound.reshape(-1).astype(np.float64), oracle.share(missed), holds))
    return parts


def _random(layer: Layer, chance: np.random.Generator) -> Queries:
    """The workload's queries, turned a little and of other lengths, each seeing a range of its own; one in eight is noise."""
    q = layer.workload.queries
    heads, n, _ = q.shape
    length = np.linalg.norm(q, axis=2, keepdims=True)
    noise = chance.standard_normal(q.shape).astype(np.float32)
    noise *= length / np.linalg.norm(noise, axis=2, keepdims=True)
    turned = np.where(chance.random((heads, n, 1)) < 1 / 8, noise, q + chance.uniform(0, 0.5, (heads, n, 1)) * noise)
    turned *= np.exp(chance.normal(0, 0.5, (heads, n, 1)))
    begin = np.where(chance.random(n) < 0.7, 0, chance.integers(0, layer.tokens // 2, n))
    end = np.where(chance.random(n) < 0.7, layer.tokens, chance.integers(layer.tokens // 2, layer.tokens, n))
    hidden = None
    if chance.random() < 0.3:
        hidden = np.zeros(-(-layer.tokens // 64), np.uint64)
        hidden[chance.integers(0, len(hidden), len(hidden) // 4)] = chance.integers(0, 2**63, len(hidden) // 4, np.uint64)
    seen = Queries.of(turned.astype(np.float32), layer.kv_heads, layer.scale, layer.tokens, hidden)
    return replace(seen, begin=begin.astype(np.int64), end=end.astype(np.int64))


def _retrieval(chance: np.random.Generator) -> Retrieval:
    choices = (
        Dipr(float(np.exp(chance.uniform(-7, -1)))),
        TopK(int(chance.integers(1, 300))),
        TopP(float(chance.uniform(0.3, 0.99))),
    )
    return choices[int(chance.integers(3))]
