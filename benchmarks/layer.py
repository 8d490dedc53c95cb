"""One layer of a workload in blocks, and its two ways to attend: everything, or what an index finds."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import ml_dtypes
import numpy as np

from benchmarks.harness import huge_pages
from benchmarks.workloads import Workload
from indexes.base import Found, Index, Queries
from indexes.blocks import Blocks
from indexes.retrieval import Retrieval
from kvdb import _native

BLOCK_SIZE = 64
FIRST, LAST = 64, 256
"""The window: tokens that are attended exactly, whatever an index finds."""
DENSE = 0.04
"""Where more than this share of the tokens is wanted, reading all of them is cheaper than picking: attention is exact then."""


@dataclass(frozen=True)
class Answer:
    """out: float32 `[q_heads, 1, head_dim]`. nbytes: read for it. found: by the search, in search_s seconds.
    whole: whether that was too much, so that everything was read after all."""

    out: np.ndarray
    nbytes: int
    found: Found
    search_s: float
    whole: bool


class Layer:
    """A workload's keys and values in blocks that lie in huge pages, as in the block pool."""

    def __init__(self, workload: Workload) -> None:
        heads, self.tokens, head_dim = workload.k.shape
        self.workload, self.scale, self.kv_heads = workload, workload.scale, heads
        dtype = workload.k.dtype.name
        self.geometry = _native.Geometry(getattr(_native.Dtype, dtype), heads, head_dim, BLOCK_SIZE)
        count = -(-self.tokens // BLOCK_SIZE)
        memory = huge_pages(count * self.geometry.block_bytes)
        table = np.uint64(memory.ctypes.data) + np.arange(count, dtype=np.uint64) * np.uint64(self.geometry.block_bytes)
        self.blocks = Blocks(dtype, heads, head_dim, BLOCK_SIZE, table, self.tokens, memory)
        self.counts = np.full(count, BLOCK_SIZE, np.int32)
        self.counts[-1] = self.tokens - (count - 1) * BLOCK_SIZE
        step = 1 << 16
        for at in range(0, self.tokens, step):  # so that mapped arrays need not be in memory at once
            k, v = (np.ascontiguousarray(bits(x[:, at : at + step])) for x in (workload.k, workload.v))
            assert _native.append(self.geometry, table, at, k, v) is None
        last = -(-LAST // BLOCK_SIZE)
        edge = [*range(FIRST // BLOCK_SIZE), *range(count - last, count)]
        self._window = table[edge], self.counts[edge]
        self.begin = np.array([FIRST], np.int64)
        self.end = np.array([(count - last) * BLOCK_SIZE], np.int64)

    @property
    def window(self) -> tuple[int, int]:
        """As indexes.oracle.Oracle takes it."""
        return FIRST, self.tokens - int(self.end[0])

    def query(self, i: int) -> np.ndarray:
        """`[q_heads, 1, head_dim]` in the layer's dtype."""
        return np.ascontiguousarray(self.workload.queries[:, i : i + 1]).astype(self.workload.k.dtype)

    def queries(self) -> Queries:
        """All of the workload's, seeing everything."""
        return Queries.of(self.workload.queries, self.kv_heads, self.scale, self.tokens)

    @property
    def nbytes(self) -> int:
        return self.tokens * self.kv_heads * self.blocks.token_nbytes

    def exact(self, q: np.ndarray) -> np.ndarray:
        """float32, as q."""
        out = np.empty(q.shape, np.float32)
        _native.attend(self.geometry, bits(q), self.blocks.table, self.counts, 0, self.scale, out)
        return out

    def sparse(self, index: Index, q: np.ndarray, retrieval: Retrieval) -> Answer:
        """The window exactly; of the rest what the index finds, by a search that starts from the window's largest score."""
        out, lse, top = np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
        table, counts = self._window
        _native.attend(self.geometry, bits(q), table, counts, 0, self.scale, out, lse, top)
        floor = top / np.float32(self.scale)
        queries = Queries(q.astype(np.float32), self.kv_heads, self.scale, self.begin, self.end, floor, lse)
        started = perf_counter()
        found = index.search(queries, retrieval)
        search_s = perf_counter() - started
        token = self.blocks.token_nbytes
        nbytes = found.nbytes + sum(self.window) * self.kv_heads * token
        if len(found.ids) > DENSE * q.shape[0] * self.tokens:
            return Answer(self.exact(q), nbytes + self.nbytes, found, search_s, whole=True)
        given = found.offsets, found.ids, found.scores, np.full(lse.shape, -np.inf, np.float32)
        _native.attend_found(self.geometry, self.blocks.table, *given, self.scale, out, lse, out, lse)
        return Answer(out, nbytes + len(found.ids) * token // 2, found, search_s, whole=False)


def bits(array: np.ndarray) -> np.ndarray:
    """Memory as the native modules take it: 16-bit floats as uint16."""
    return array.view(np.uint16) if array.dtype in {np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)} else array


def joined(founds: list[Found]) -> Found:
    """Searches of one query each as one search of all of them."""
    heads, n = founds[0].missed.shape[0], len(founds)
    parts = [(founds[i], founds[i].offsets[h], founds[i].offsets[h + 1]) for h in range(heads) for i in range(n)]
    return Found(
        offsets=np.cumsum([0, *(end - begin for _, begin, end in parts)]).astype(np.int64),
        ids=np.concatenate([found.ids[begin:end] for found, begin, end in parts]),
        scores=np.concatenate([found.scores[begin:end] for found, begin, end in parts]),
        scanned=sum(found.scanned for found in founds),
        nbytes=sum(found.nbytes for found in founds),
        missed=np.concatenate([found.missed for found in founds], axis=1),
        missed_bound=np.concatenate([found.missed_bound for found in founds], axis=1),
    )
