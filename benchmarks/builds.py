"""How long does the graph index take to build, beside hnswlib alone with the same parameters on the same keys?

    python -m benchmarks.builds [--tokens 131072] [--heads 2] [--cache DIR]

Three builds in one run, each of all heads on all threads: hnswlib alone, the index without sample queries, and with them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import hnswlib
import numpy as np

import indexes._native as _native
from benchmarks.harness import machine, report
from benchmarks.layer import Layer
from benchmarks.workloads import Shape, generate
from indexes.hnsw import Hnsw, Settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--heads", type=int, default=2, help="KV heads of the layer (default 2)")
    parser.add_argument("--cache", type=Path, help="folder that keeps workloads")
    given = parser.parse_args()
    report("machine", **machine(), isa=_native.isa(), threads=_native.threads())
    work = generate("sharp", Shape(given.tokens), cache=given.cache)
    heads, group = given.heads, len(work.queries) // len(work.k)
    layer = Layer(
        replace(
            work,
            k=work.k[:heads],
            v=work.v[:heads],
            queries=work.queries[: heads * group],
            query_samples=work.query_samples[: heads * group],
        )
    )
    alone = alone_s(layer)
    without = build_s(layer, None)
    sampled = build_s(layer, layer.workload.query_samples)
    report(
        "builds",
        tokens=given.tokens,
        kv_heads=heads,
        hnswlib_s=alone,
        without_samples_s=without,
        with_samples_s=sampled,
        over_hnswlib=without / alone,
        with_samples_over_hnswlib=sampled / alone,
    )


def alone_s(layer: Layer) -> float:
    """Seconds that hnswlib takes for all heads."""
    settings, total = Settings(), 0.0
    for head in range(layer.kv_heads):
        keys = layer.blocks.keys(head)
        started = time.perf_counter()
        graph = hnswlib.Index("l2", keys.shape[1])
        graph.init_index(len(keys), M=settings.links, ef_construction=settings.width)
        graph.add_items(keys, num_threads=_native.threads())
        total += time.perf_counter() - started
    return total


def build_s(layer: Layer, query_samples: np.ndarray | None) -> float:
    started = time.perf_counter()
    Hnsw.build(layer.blocks, query_samples)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
