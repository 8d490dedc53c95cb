"""What other libraries reach on the same keys: inner-product top-k by hnswlib, faiss (HNSW, IVF) and usearch.

They have no DIPR, so k is the mean size of the DIPR set. One index for each KV head over the keys between the window's two ends.
"""

from __future__ import annotations

import json
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import hnswlib
import numpy as np
import usearch.index

from benchmarks.layer import Layer
from indexes.oracle import Oracle
from indexes.retrieval import Dipr

M, EF_CONSTRUCTION = 16, 200
"""Edges a node (twice as many on the lowest level) and search effort while building, alike for every graph."""
THREADS = 2


class Hnswlib:
    """https://github.com/nmslib/hnswlib."""

    name = "hnswlib"
    efforts = (64, 128, 256, 512, 1024)

    def build(self, keys: np.ndarray) -> None:
        self._index = hnswlib.Index("ip", keys.shape[1])
        self._index.init_index(len(keys), M=M, ef_construction=EF_CONSTRUCTION)
        self._index.add_items(keys, num_threads=THREADS)

    def search(self, q: np.ndarray, k: int, effort: int, threads: int) -> np.ndarray:
        self._index.set_ef(max(effort, k))
        return self._index.knn_query(q, k, num_threads=threads)[0].astype(np.int64)

    def save(self, path: Path) -> None:
        self._index.save_index(str(path))

    def load(self, path: Path, head_dim: int) -> None:
        self._index = hnswlib.Index("ip", head_dim)
        self._index.load_index(str(path))


class _Faiss(ABC):
    _index: Any

    def search(self, q: np.ndarray, k: int, effort: int, threads: int) -> np.ndarray:
        faiss.omp_set_num_threads(threads)
        return np.asarray(self._index.search(q, k, params=self._parameters(k, effort))[1])

    @abstractmethod
    def _parameters(self, k: int, effort: int) -> Any: ...

    def save(self, path: Path) -> None:
        faiss.write_index(self._index, str(path))

    def load(self, path: Path, head_dim: int) -> None:
        self._index = faiss.read_index(str(path))
        assert self._index.d == head_dim


class FaissHnsw(_Faiss):
    """IndexHNSWFlat."""

    name = "faiss-hnsw"
    efforts = (64, 128, 256, 512, 1024)

    def build(self, keys: np.ndarray) -> None:
        faiss.omp_set_num_threads(THREADS)
        self._index = faiss.IndexHNSWFlat(keys.shape[1], M, faiss.METRIC_INNER_PRODUCT)
        self._index.hnsw.efConstruction = EF_CONSTRUCTION
        self._index.add(keys)

    def _parameters(self, k: int, effort: int) -> Any:
        return faiss.SearchParametersHNSW(efSearch=max(effort, k))


class FaissIvf(_Faiss):
    """IndexIVFFlat, with twice the root of n lists."""

    name = "faiss-ivf"
    efforts = (4, 16, 64, 256)

    def build(self, keys: np.ndarray) -> None:
        faiss.omp_set_num_threads(THREADS)
        lists = max(1, int(2 * len(keys) ** 0.5))
        quantizer = faiss.IndexFlatIP(keys.shape[1])
        self._index = faiss.IndexIVFFlat(quantizer, keys.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
        self._index.train(keys[np.random.default_rng(0).permutation(len(keys))[: 40 * lists]])
        self._index.add(keys)

    def _parameters(self, k: int, effort: int) -> Any:  # noqa: ARG002
        return faiss.SearchParametersIVF(nprobe=effort)


class Usearch:
    """https://github.com/unum-cloud/usearch, keys kept in bfloat16."""

    name = "usearch"
    efforts = (64, 128, 256, 512, 1024)

    def _empty(self, head_dim: int) -> Any:
        options = {"connectivity": M, "expansion_add": EF_CONSTRUCTION}
        return usearch.index.Index(ndim=head_dim, metric="ip", dtype="bf16", **options)

    def build(self, keys: np.ndarray) -> None:
        self._index = self._empty(keys.shape[1])
        self._index.add(np.arange(len(keys)), keys, threads=THREADS)

    def search(self, q: np.ndarray, k: int, effort: int, threads: int) -> np.ndarray:
        self._index.expansion_search = max(effort, k)
        return np.asarray(self._index.search(q, k, threads=threads).keys).astype(np.int64).reshape(len(q), -1)

    def save(self, path: Path) -> None:
        self._index.save(str(path))

    def load(self, path: Path, head_dim: int) -> None:
        self._index = self._empty(head_dim)
        self._index.load(str(path))


OTHERS: dict[str, type[Any]] = {other.name: other for other in (Hnswlib, FaissHnsw, FaissIvf, Usearch)}
"""The libraries by name. efforts: ef of a graph, or how many lists of an inverted file are probed. `search` gives ids, as many
rows as q, of k."""


@dataclass(frozen=True)
class Point:
    """One library at one effort. recall: of the DIPR set. single_ms: of all heads' queries one at a time, on one thread;
    batched_ms: of all heads, a group's queries at a time, on THREADS threads. Both count every KV head, measured or not."""

    name: str
    effort: int
    k: int
    recall: float
    single_ms: float
    batched_ms: float
    build_s_per_million: float


def points(name: str, layer: Layer, oracle: Oracle, heads: int, cache: Path | None) -> Iterator[Point]:
    """The point of every effort, measured on the first `heads` KV heads; one index is in memory at a time."""
    relevant = oracle.relevant_tokens(Dipr())
    k = max(1, round(float(np.mean([len(ids) for ids in relevant]))))
    seen: dict[int, list[tuple[float, float, float, float]]] = {}
    for head in range(heads):
        other, build_s = _built(name, layer, head, cache)
        for effort in other.efforts:
            seen.setdefault(effort, []).append((*_point(other, effort, k, layer, head, relevant), build_s))
    for effort, rows in seen.items():
        recall, single, batched, build_s = np.mean(rows, axis=0).tolist()
        per_million = build_s / (layer.tokens / 1e6)
        yield Point(name, effort, k, recall, 1e3 * single * layer.kv_heads, 1e3 * batched * layer.kv_heads, per_million)


def exhaustive(oracle: Oracle) -> float:
    """Recall of the DIPR set that a perfect top-k of its mean size has: sets of other sizes are cut or overfull."""
    relevant = oracle.relevant_tokens(Dipr())
    k = max(1, round(float(np.mean([len(ids) for ids in relevant]))))
    return float(np.mean([min(k, len(ids)) / len(ids) if len(ids) else 1.0 for ids in relevant]))


def _built(name: str, layer: Layer, head: int, cache: Path | None) -> tuple[Any, float]:
    other = OTHERS[name]()
    path = None if cache is None else cache / f"{layer.workload.name}-{layer.tokens}-{head}.{name}"
    if path is not None and path.exists():
        other.load(path, layer.blocks.head_dim)
        return other, json.loads(path.with_suffix(f".{name}.json").read_text())["build_s"]
    keys = layer.blocks.keys(head, layer.begin, layer.end)
    started = time.perf_counter()
    other.build(keys)
    build_s = time.perf_counter() - started
    if path is not None:
        other.save(path)
        path.with_suffix(f".{name}.json").write_text(json.dumps({"build_s": build_s}))
    return other, build_s


def _point(other: Any, effort: int, k: int, layer: Layer, head: int, relevant: list[np.ndarray]) -> tuple[float, float, float]:
    """Recall, and seconds of a step of one KV head, one query at a time and together."""
    q_heads, n, _ = layer.workload.queries.shape
    group, offset = q_heads // layer.kv_heads, layer.begin
    mine = range(head * group, (head + 1) * group)
    recalls, single, batched = [], [], []
    for i in range(n):
        q = np.ascontiguousarray(layer.workload.queries[mine.start : mine.stop, i])
        started = time.perf_counter()
        for row in q:
            other.search(row[None], k, effort, 1)
        middle = time.perf_counter()
        ids = other.search(q, k, effort, THREADS)
        batched.append(time.perf_counter() - middle)
        single.append(middle - started)
        for row, head_number in zip(ids, mine, strict=True):
            asked = relevant[head_number * n + i]
            recalls.append(np.isin(asked, row + offset).mean() if len(asked) else 1.0)
    return float(np.mean(recalls)), statistics.median(single), statistics.median(batched)
