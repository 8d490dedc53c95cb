"""The index kinds as the benchmarks build them, and keep them in files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.layer import Layer
from benchmarks.workloads import Workload
from indexes.base import Index
from indexes.blocks import Blocks
from indexes.coarse.bounds import Bounds
from indexes.coarse.clusters import Clusters
from indexes.coarse.means import Means
from indexes.flat import Flat
from indexes.hnsw import Hnsw
from indexes.quantized import Quantized

Builder = Callable[[Blocks, Workload], Index]

KINDS: dict[str, tuple[Any, Builder]] = {
    "flat": (Flat, lambda blocks, _: Flat.build(blocks)),
    "quantized": (Quantized, lambda blocks, _: Quantized.build(blocks)),
    "bounds": (Bounds, lambda blocks, _: Bounds.build(blocks)),
    "means": (Means, lambda blocks, _: Means.build(blocks)),
    "clusters": (Clusters, lambda blocks, _: Clusters.build(blocks)),
    "hnsw": (Hnsw, lambda blocks, workload: Hnsw.build(blocks, query_samples=workload.query_samples)),
    "hnsw-unsampled": (Hnsw, lambda blocks, _: Hnsw.build(blocks)),
}
USUAL = [kind for kind in KINDS if kind != "hnsw-unsampled"]


@dataclass(frozen=True)
class Built:
    """build_s: how long building took, also where it was loaded; None where that is not known."""

    kind: str
    index: Index
    build_s: float | None

    def build_s_per_million(self) -> float | None:
        """Seconds per million keys, a token being one key for each KV head."""
        return None if self.build_s is None else self.build_s / (self.index.blocks.tokens * self.index.blocks.kv_heads / 1e6)

    def token_nbytes(self) -> float:
        """Kept beside keys and values, for each token and KV head."""
        return self.index.nbytes / (self.index.blocks.tokens * self.index.blocks.kv_heads)


def build(kind: str, layer: Layer, cache: Path | None = None) -> Built:
    """The index, from its file where there is one."""
    cls, builder = KINDS[kind]
    shape = "x".join(map(str, layer.workload.k.shape))
    path = None if cache is None else cache / f"{layer.workload.name}-{shape}-{kind}.index"
    if path is not None and path.exists():
        return Built(kind, cls.load(path, layer.blocks), json.loads(path.with_suffix(".json").read_text())["build_s"])
    started = time.perf_counter()
    index = builder(layer.blocks, layer.workload)
    build_s = time.perf_counter() - started
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        index.save(path)
        path.with_suffix(".json").write_text(json.dumps({"build_s": build_s}))
    return Built(kind, index, build_s)
