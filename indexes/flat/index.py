"""A scan of short codes whose bounds make the result exact.

The index keeps the length of every key, and 8 bits a dimension of it, relative to the mean of its chunk and rotated. By
Cauchy-Schwarz the length bounds q.k, and the length of the code's residual bounds the error of an estimated q.k. A search
excludes keys by their length, then by their signs or by four bits and then eight, and scores the rest exactly, so that DIPR and
top-k return what they would if every key had been read. The codes are scalar quantisation with a bound for each key; RaBitQ
(arXiv 2405.12497) is the model for the centre, the rotation and the per-key factors.

All bounds are deterministic; none holds only with high probability.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

import indexes.flat.cost as _cost
from indexes import file
from indexes.base import BuildCost, Cost, Float32, IndexCorrupt, Queries, SearchResult
from indexes.blocks import Blocks
from indexes.flat.codes import Codes, chunks_of
from indexes.flat.top_p import search_top_p
from indexes.retrieval import Dipr, Retrieval, TopK, TopP

K_MAX = 2**31


class Flat:
    """An index of kind "flat". It keeps about head_dim + 9 bytes for each token and KV head, beside the keys."""

    kind: ClassVar[str] = "flat"
    walks: ClassVar[bool] = False
    estimates_tail: ClassVar[bool] = False

    def __init__(self, blocks: Blocks, codes: Codes) -> None:
        self.blocks = blocks
        self._codes = codes

    @classmethod
    def build(cls, blocks: Blocks, query_samples: Float32 | None = None) -> Self:  # noqa: ARG003, codes need none
        """Code all keys of `blocks`."""
        index = cls(replace(blocks, tokens=0), Codes.empty(blocks.kv_heads, blocks.head_dim, 0))
        index.insert(blocks)
        return index

    @classmethod
    def build_cost(cls, tokens: int, kv_heads: int, head_dim: int) -> BuildCost:
        """See `indexes.registry.Priced`; the figures are those of benchmarks/README.md."""
        keys = tokens * kv_heads
        return BuildCost(6.4e-9 * keys * head_dim, keys * (1.13 * head_dim + 12), 0.08)

    @property
    def nbytes(self) -> int:
        """See `indexes.base.Index`."""
        return self._codes.nbytes

    def insert(self, blocks: Blocks) -> None:
        """See `indexes.base.Index`. Raises ValueError for blocks of another layout, or fewer tokens."""
        blocks.check_extends(self.blocks)
        self._codes = self._codes.grown(blocks.tokens)
        self._codes.native.insert(blocks.native, self.blocks.tokens)
        self.blocks = blocks

    def search(
        self,
        queries: Queries,
        retrieval: Retrieval,
        *,
        estimate_tail: bool = False,  # noqa: ARG002, of the protocol; codes have no estimate of values
        tight: bool = False,
        give_up: bool = False,
    ) -> SearchResult:
        """See `indexes.base.Index`; the result is exact. `missed_bound` is cheap and loose unless `tight`; then one pass over all
        codes gives every token that was not found a bound of its own. Tails are not estimated: `tail` is None.

        TopP: tokens outside count as seen, so that what is left out has at most the share 1 - p of all.

        give_up: some chunks of each KV head predict how many keys the codes of all chunks would let pass. Where reading codes and
        keys is expected to cost nearly as much as reading all keys and values, the queries of the KV head are given up, except
        those that lengths alone answer and those that see less than 8,192 tokens. Which queries are given up does not depend on
        the threads.
        """
        if isinstance(retrieval, TopP):
            return search_top_p(
                lambda some, beta: self.within(some, beta, tight=beta < math.inf, give_up=give_up), queries, retrieval.p
            )
        beta, k = math.inf, 0
        if isinstance(retrieval, Dipr):
            beta = retrieval.beta(queries.scale)
        elif isinstance(retrieval, TopK):
            k = retrieval.k
        return self.within(queries, beta, k, tight=tight, give_up=give_up)

    def within(self, queries: Queries, beta: float, k: int = 0, *, tight: bool = False, give_up: bool = False) -> SearchResult:
        """The visible tokens within `beta`, in units of q.k, of the largest q.k and queries.floor, or the k largest."""
        native, blocks = self._codes.native, self.blocks.native
        found = native.search(blocks, queries.native, beta, min(k, K_MAX), queries.scale, give_up)
        offsets, ids, scores, caps, missed, bound, counters, dense = found
        shape = queries.q.shape[:2]
        *_, nbytes, looked_at = counters.tolist()
        if tight and np.count_nonzero(dense) < queries.heads * (queries.rows // queries.kv_heads):
            native.missed_mass(blocks, queries.native, offsets, ids, caps, queries.scale, missed, bound)
            nbytes += self._codes.used_nbytes(self.blocks.tokens) * queries.heads // queries.kv_heads
        scanned = looked_at * queries.heads
        flags = dense.view(np.bool_).reshape(shape) if give_up else None
        return SearchResult(offsets, ids, scores, scanned, nbytes, missed.reshape(shape), bound.reshape(shape), None, flags)

    def verify(self) -> None:
        """Check that each key lies within the bounds of its code. Raises IndexCorrupt."""
        wrong = self._codes.native.verify(self.blocks.native)
        if wrong:
            raise IndexCorrupt(f"{wrong} keys lie beyond what their codes claim; build the index again")

    def save(self, path: Path) -> None:
        """See `indexes.base.Index`. Raises OSError."""
        file.write(path, self.kind, {"blocks": self.blocks.identity()}, self._codes.arrays(chunks_of(self.blocks.tokens)))

    @classmethod
    def load(cls, path: Path, blocks: Blocks) -> Self:
        """See `indexes.base.Index`. Raises IndexCorrupt, OSError."""
        header, arrays = file.read(path, cls.kind)
        file.check_blocks(path, header, blocks)
        expected = Codes.empty(blocks.kv_heads, blocks.head_dim, chunks_of(blocks.tokens)).arrays(None)
        for name, array in expected.items():
            if name not in arrays or (arrays[name].shape, arrays[name].dtype) != (array.shape, array.dtype):
                raise IndexCorrupt(f"{path} holds no {name} of shape {array.shape}; build the index again")
        return cls(blocks, Codes(**{name: arrays[name] for name in expected}))

    def cost(
        self, tokens: int, rows: int, retrieval: Retrieval, *, expected_tokens: float | None = None, heads: int | None = None
    ) -> Cost:
        """See `indexes.base.Index`, and `indexes.flat.cost` for the formula."""
        active = self.blocks.kv_heads if heads is None else heads
        return _cost.of(self.blocks, tokens, rows, active, retrieval, expected_tokens)
