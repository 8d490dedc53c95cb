"""How fast the kinds of index answer that estimate the rest, relative to exact attention: in turns, over many layers."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import kvdb._native as kvdb_native
from benchmarks.estimators import Head, errors
from benchmarks.harness import measure
from indexes.base import Index, Queries
from indexes.blocks import Blocks
from indexes.coarse.clusters import Clusters
from indexes.quantized import Quantized
from indexes.retrieval import Dipr, Retrieval, TopK
from kvdb.attention.block_run import BlockReads
from kvdb.attention.exact import whole
from kvdb.storage.block_layout import BlockLayout
from kvdb.types import bits

COPIES_NBYTES = 1 << 26
"""Keys and values that are read in turn, as those of a model's layers are."""
BLOCK = 64
WAYS: dict[str, tuple[type[Quantized] | type[Clusters], Retrieval]] = {
    "quantized top_k(1)": (Quantized, TopK(1)),
    "quantized top_k(16)": (Quantized, TopK(16)),
    "quantized top_k(64)": (Quantized, TopK(64)),
    "quantized top_k(256)": (Quantized, TopK(256)),
    "quantized dipr(0.1)": (Quantized, Dipr(0.1)),
    "coarse-clusters top_k(64)": (Clusters, TopK(64)),
    "coarse-clusters top_k(256)": (Clusters, TopK(256)),
}


class Layer:
    """A layer's blocks, several times over; each answer takes the next."""

    def __init__(self, heads: list[Head]) -> None:
        k, v = (np.stack([getattr(head, which) for head in heads]).astype(ml_dtypes.bfloat16) for which in "kv")
        self.scale, self.group = heads[0].scale, heads[0].q.shape[0]
        self.q = np.concatenate([head.q for head in heads]).astype(ml_dtypes.bfloat16)
        copies = max(COPIES_NBYTES // (2 * k.nbytes), 1)
        self.blocks = [Blocks.of(k, v, BLOCK) for _ in range(copies)]
        self.layout = BlockLayout("bfloat16", len(heads), k.shape[-1], BLOCK)
        self.turn = 0

    def next(self) -> tuple[int, np.ndarray]:
        """The next copy, and the next query `[q_heads, 1, head_dim]`."""
        self.turn += 1
        return self.turn % len(self.blocks), np.ascontiguousarray(self.q[:, self.turn % self.q.shape[1]][:, None])

    def reads(self, blocks: Blocks, first: int = 0) -> BlockReads:
        """The blocks from `first` on."""
        counts = np.minimum(BLOCK, blocks.tokens - BLOCK * np.arange(len(blocks.table))).astype(np.int32)
        return BlockReads(blocks.table[first:], counts[first:])

    def exact(self, copy: int, q: np.ndarray) -> np.ndarray:
        return whole(self.layout, self.reads(self.blocks[copy]), q, 0, self.scale).state.out

    def estimated(self, index: Index, retrieval: Retrieval, q: np.ndarray) -> np.ndarray:
        """Search an index over all blocks but the last, which is read whole."""
        blocks = index.blocks
        stop = (len(blocks.table) - 1) * BLOCK
        window = whole(self.layout, self.reads(blocks, len(blocks.table) - 1), q, 0, self.scale)
        queries = Queries.of(q.astype(np.float32), blocks.kv_heads, self.scale, stop)
        found = index.search(queries, retrieval, estimate_tail=True)
        out, lse = np.empty_like(window.state.out), np.empty_like(window.state.lse)
        retrieved = blocks.table, found.offsets, found.ids, found.scores, self.scale
        kvdb_native.attend_retrieved(self.layout.native, *retrieved, window.state.out, window.state.lse, bits(out), lse)
        assert found.tail is not None
        to, to_lse = np.empty_like(out), np.empty_like(lse)
        kvdb_native.merge_tail(self.layout.native, out, lse, found.tail, found.missed, bits(to), to_lse)
        return to


def speeds(heads: list[Head], rounds: int = 15) -> dict[str, dict[str, float]]:
    """For each way the microseconds of a layer's answer, how many times as fast as exact attention that is, and its errors."""
    layer = Layer(heads)
    indexes = {kind: [kind.build(blocks) for blocks in layer.blocks] for kind in {kind for kind, _ in WAYS.values()}}

    def answer(way: str, copy: int, q: np.ndarray) -> np.ndarray:
        kind, retrieval = WAYS[way]
        return layer.estimated(indexes[kind][copy], retrieval, q)

    calls = 4 * len(layer.blocks)
    candidates = {"exact": lambda: [layer.exact(*layer.next()) for _ in range(calls)]}
    candidates |= {way: lambda way=way: [answer(way, *layer.next()) for _ in range(calls)] for way in WAYS}
    seconds = measure(candidates, rounds)
    figures = {}
    for way in WAYS:
        error = []
        for i in range(layer.q.shape[1]):
            q = np.ascontiguousarray(layer.q[:, i][:, None])
            exact = layer.exact(0, q)
            error.append(np.linalg.norm(answer(way, 0, q) - exact) / np.linalg.norm(exact))
        times = {"layer_us": seconds[way] / calls * 1e6, "times_as_fast": seconds["exact"] / seconds[way]}
        figures[way] = times | errors(np.array(error))
    return figures
