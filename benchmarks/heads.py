"""A context whose layers have heads of different kinds, in a database."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

import indexes.registry as registry
import kvdb
from benchmarks.workloads import Shape, Workload, generate
from indexes.base import Index
from indexes.blocks import Blocks
from kvdb.database import Database

LAYERS = ("diffuse heads", "mixed heads", "sharp heads")
KV_HEADS, GROUP = 4, 4
PIECE = 1 << 15


class Heads:
    """Keys, values and queries of three layers: diffuse heads, half of them sharp, and sharp heads."""

    def __init__(self, tokens: int, cache: Path | None) -> None:
        self.tokens = tokens
        shape = Shape(tokens, kv_heads=KV_HEADS, group=GROUP)
        self.spec = kvdb.ModelSpec("heads", len(LAYERS), KV_HEADS * GROUP, KV_HEADS, shape.head_dim)
        self._cache = cache
        self._kinds = {kind: generate(kind, shape, queries=8, query_samples=32, cache=cache) for kind in ("sharp", "diffuse")}

    def _of(self, layer: int, kv_head: int) -> Workload:
        sharp = layer == len(LAYERS) - 1 or (layer == 1 and kv_head % 2 == 1)
        return self._kinds["sharp" if sharp else "diffuse"]

    def store(self, database: Database, name: str, ids: np.ndarray) -> None:
        """Import everything, piece by piece."""
        writing = database.begin_import(self.spec, ids, name)
        for layer in range(len(LAYERS)):
            for k, v in self.pieces(layer):
                writing.write(layer, k, v)
            writing.sample(layer, self._queries[layer][:, 8:].astype(self.spec.numpy_dtype))
        writing.commit()

    def pieces(self, layer: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys and values of a layer, `[kv_heads, n, head_dim]`, piece by piece."""
        for at in range(0, self.tokens, PIECE):
            piece = slice(at, at + PIECE)
            k, v = (np.stack([getattr(self._of(layer, head), which)[head, piece] for head in range(KV_HEADS)]) for which in "kv")
            yield k, v

    @cached_property
    def _queries(self) -> list[np.ndarray]:
        """The queries of each layer, `[q_heads, 8 to ask + 32 to learn from, head_dim]`."""
        layers = []
        for layer in range(len(LAYERS)):
            works = [self._of(layer, head // GROUP) for head in range(KV_HEADS * GROUP)]
            layers.append(np.stack([np.concatenate([w.queries[h], w.query_samples[h]]) for h, w in enumerate(works)]))
        return layers

    def query(self, layer: int, i: int, count: int) -> np.ndarray:
        """`[q_heads, count, head_dim]` in the spec's dtype."""
        picked = [(i + j) % 8 for j in range(count)]
        return np.ascontiguousarray(self._queries[layer][:, picked]).astype(self.spec.numpy_dtype)

    def nbytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens in one layer."""
        return tokens * self.spec.token_nbytes

    def index(self, kind: str, layer: int, blocks: Blocks) -> Index:
        """Built, or from the cache."""
        path = None if self._cache is None else self._cache / f"heads-{self.tokens}-{layer}-{kind}.index"
        if path is not None and path.exists():
            return registry.load(kind, path, blocks)
        query_samples = self._queries[layer][:, 8:].astype(self.spec.numpy_dtype).astype(np.float32)
        index = registry.build(kind, blocks, query_samples)
        if path is not None:
            index.save(path)
        return index
