"""A scan of 4-bit codes: the few tokens with the largest weights are read as they are stored, all others count by their codes.

The errors of the codes are independent, so they average out over the many tokens of a diffuse head. The few tokens with large
weights are found by their codes, and read as they are stored. Keys and values are coded relative to the mean of their chunk and
rotated, so that no channel stands out (QuaRot, arXiv 2404.00456). Queries are rounded to 8 bits, weights to 7.
"""

from typing import ClassVar

import numpy as np

import indexes._native as _native
import indexes.quantized.cost as _cost
from indexes.base import BuildCost, Cost, Queries, SearchResult
from indexes.chunk_codes import CHUNK, ChunkCodes
from indexes.file import Shapes
from indexes.retrieval import Retrieval, kernel_parameter
from indexes.searcher import Searcher

MARGIN = 0.35
"""The share of the bound on a code's error that a token is given where the tail is not estimated; with 1 nothing is
overlooked."""


class Quantized(ChunkCodes[_native.Quantized]):
    """An index of kind "quantized". It keeps about head_dim + 5 bytes for each token and KV head, beside the keys and values.

    Tokens that are found have exact scores. A token whose code errs by more than the margin may be overlooked; its weight counts
    as missed. With `estimate_tail`, codes answer for all tokens that are not found; runs of 64 that together weigh at most a 50th
    of what is found and outside count with the mean value of their chunk.
    """

    kind: ClassVar[str] = "quantized"
    estimates_tail: ClassVar[bool] = True
    file_format: ClassVar[int] = 2
    kernels = staticmethod(_native.Quantized)

    @staticmethod
    def shapes(chunks: int, kv_heads: int, head_dim: int) -> Shapes:
        """See `ChunkCodes.shapes`. What belongs to keys stands before what belongs to values."""
        return {
            "centres": ((chunks, kv_heads, 2 * head_dim), np.float32),
            "scales": ((chunks, kv_heads, 2 * CHUNK), np.uint16),
            "keys": ((chunks, kv_heads, CHUNK * head_dim // 2), np.uint8),
            "values": ((chunks, kv_heads, CHUNK * _cost.value_dims(head_dim) // 2), np.uint8),
            "bounds": ((chunks, kv_heads, 2 * _native.QUANTIZED_RUNS), np.float32),
        }

    @classmethod
    def build_cost(cls, tokens: int, kv_heads: int, head_dim: int) -> BuildCost:
        """See `indexes.registry.Priced`, and `indexes.quantized.cost` for the formula."""
        return _cost.to_build(tokens, kv_heads, head_dim)

    def search(
        self, queries: Queries, retrieval: Retrieval, *, estimate_tail: bool = False, tight: bool = False, give_up: bool = False
    ) -> SearchResult:
        """See `indexes.base.Index`. tight: reads every visible key, so that `missed` and its bound are exact.

        estimate_tail: tokens are chosen by their codes alone, without a margin, because the others count too. give_up: a KV head
        is given up if one of its queries wants more than a quarter of the tokens that it sees. TopP: the mass in queries.outside
        counts as found, and all masses are estimated from codes. Raises ValueError.
        """
        fields = self._kernels.search(
            self.blocks.native,
            queries.native,
            *kernel_parameter(retrieval, queries.scale, self.blocks.tokens),
            queries.scale,
            0.0 if estimate_tail else MARGIN,
            queries.outside,
            estimate_tail,
            tight,
            give_up,
        )
        return SearchResult.of_kernel(queries, fields, tail=estimate_tail, give_up=give_up)

    def searcher(self, retrieval: Retrieval, scale: float, *, estimate_tail: bool) -> Searcher | None:
        """See `indexes.searcher.searcher_of`."""
        number_and_parameter = kernel_parameter(retrieval, scale, self.blocks.tokens)
        margin = 0.0 if estimate_tail else MARGIN
        return Searcher(self._kernels.searcher(self.blocks.native, *number_and_parameter, scale, margin, estimate_tail))

    def cost(
        self, tokens: int, rows: int, retrieval: Retrieval, *, expected_tokens: float | None = None, heads: int | None = None
    ) -> Cost:
        """See `indexes.base.Index`, and `indexes.quantized.cost` for the formula."""
        active = self.blocks.kv_heads if heads is None else heads
        return _cost.of(self.blocks, tokens, rows, active, retrieval, expected_tokens)
