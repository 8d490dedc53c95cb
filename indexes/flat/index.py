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
from typing import ClassVar

import numpy as np

import indexes._native as _native
import indexes.flat.cost as _cost
from indexes.base import BuildCost, Cost, Queries, SearchResult
from indexes.chunk_codes import CHUNK, ChunkCodes
from indexes.file import Shapes
from indexes.flat.top_p import search_top_p
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP
from indexes.searcher import Searcher

K_MAX = 2**31


class Flat(ChunkCodes[_native.Flat]):
    """An index of kind "flat". It keeps about head_dim + 9 bytes for each token and KV head, beside the keys."""

    kind: ClassVar[str] = "flat"
    file_format: ClassVar[int] = 2
    kernels = staticmethod(_native.Flat)

    @staticmethod
    def shapes(chunks: int, kv_heads: int, head_dim: int) -> Shapes:
        """See `ChunkCodes.shapes`."""
        plane = (chunks, kv_heads, CHUNK * head_dim // 2)
        return {
            "centres": ((chunks, kv_heads, head_dim + 1), np.float32),
            "lengths": ((chunks, kv_heads, _cost.LENGTHS * CHUNK), np.uint16),
            "high": (plane, np.uint8),
            "low": (plane, np.uint8),
            "signs": ((chunks, kv_heads, CHUNK * (head_dim // 8 + 4)), np.uint8),
            "longest": ((chunks, kv_heads, 1), np.int32),
        }

    @classmethod
    def build_cost(cls, tokens: int, kv_heads: int, head_dim: int) -> BuildCost:
        """See `indexes.registry.Priced`; the figures are those of benchmarks/README.md."""
        keys = tokens * kv_heads
        return BuildCost(6.4e-9 * keys * head_dim, keys * (1.13 * head_dim + 12), 0.08)

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
        return self.within(queries, *_range_of(retrieval, queries.scale), tight=tight, give_up=give_up)

    def searcher(
        self,
        retrieval: Retrieval,
        scale: float,
        *,
        estimate_tail: bool,  # noqa: ARG002, as in `search`
    ) -> Searcher | None:
        """See `indexes.searcher.searcher_of`; None for TopP, which takes several searches."""
        if isinstance(retrieval, TopP):
            return None
        return Searcher(self._kernels.searcher(self.blocks.native, *_range_of(retrieval, scale), scale))

    def within(self, queries: Queries, beta: float, k: int = 0, *, tight: bool = False, give_up: bool = False) -> SearchResult:
        """The visible tokens within `beta`, in units of q.k, of the largest q.k and queries.floor, or the k largest."""
        codes, blocks = self._kernels, self.blocks.native
        fields, caps = codes.search(blocks, queries.native, beta, k, queries.scale, give_up)
        result = SearchResult.of_kernel(queries, fields, tail=False, give_up=give_up)
        given_up = result.dense is not None and np.count_nonzero(result.dense) == queries.heads * (
            queries.rows // queries.kv_heads
        )
        if not tight or given_up:
            return result
        missed, bound = result.missed, result.missed_bound
        codes.missed_mass(blocks, queries.native, result.offsets, result.ids, caps, queries.scale, missed, bound)
        read = sum(array.nbytes for array in self._used().values()) * queries.heads // queries.kv_heads
        return replace(result, nbytes=result.nbytes + read)

    def cost(
        self, tokens: int, rows: int, retrieval: Retrieval, *, expected_tokens: float | None = None, heads: int | None = None
    ) -> Cost:
        """See `indexes.base.Index`, and `indexes.flat.cost` for the formula."""
        active = self.blocks.kv_heads if heads is None else heads
        return _cost.of(self.blocks, tokens, rows, active, retrieval, expected_tokens)


def _range_of(retrieval: Exact | Dipr | TopK, scale: float) -> tuple[float, int]:
    """The range in units of q.k, and how many tokens are asked for instead; 0 for all of the range."""
    if isinstance(retrieval, Dipr):
        return retrieval.beta(scale), 0
    return math.inf, min(retrieval.k, K_MAX) if isinstance(retrieval, TopK) else 0
