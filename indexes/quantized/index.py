"""A read of short codes: the few tokens that weigh most count as they are, all others by four bits a channel.

What a code leaves of a key or value is noise of its own, so that over the many tokens of a diffuse head it averages out; where
few tokens weigh much they are found by their codes and read as they were stored. Keys and values are coded relative to the mean
of their chunk and rotated, so that no channel stands out (QuaRot, arXiv 2404.00456). A query is rounded to 8 bits, weights to 7.
"""

from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

import indexes.quantized.cost as _cost
from indexes import file
from indexes.base import Cost, Float32, IndexCorrupt, Queries, SearchResult
from indexes.blocks import Blocks
from indexes.quantized.codes import Codes, chunks_of
from indexes.retrieval import Retrieval, kernel_parameter
from indexes.searcher import Searcher

FORMAT = 2
"""Version of what a file holds."""
MARGIN = 0.35
"""The share of the bound on a code's error that a token is given, where what is not found is left out; with 1 nothing is
overlooked."""


class Quantized:
    """An index of kind "quantized". Keeps about head_dim + 5 bytes of each token and KV head beside the keys and values.

    What is found has exact scores; a token whose code errs by more than the margin may be overlooked, and its weight counts as
    missed. With `estimate_tail` all that is not found is answered from the codes.
    """

    kind: ClassVar[str] = "quantized"
    walks: ClassVar[bool] = False
    estimates_tail: ClassVar[bool] = True

    def __init__(self, blocks: Blocks, codes: Codes) -> None:
        self.blocks = blocks
        self._codes = codes

    @classmethod
    def build(cls, blocks: Blocks, query_samples: Float32 | None = None) -> Self:  # noqa: ARG003, codes need none
        """Code all keys and values of `blocks`."""
        index = cls(replace(blocks, tokens=0), Codes.empty(blocks.kv_heads, blocks.head_dim, 0))
        index.insert(blocks)
        return index

    @property
    def nbytes(self) -> int:
        """See `indexes.base.Index`."""
        return self._codes.nbytes

    def insert(self, blocks: Blocks) -> None:
        """See `indexes.base.Index`. The last chunk is coded anew. Raises ValueError for blocks of another layout, or fewer
        tokens."""
        blocks.check_extends(self.blocks)
        self._codes = self._codes.grown(blocks.tokens)
        if blocks.tokens > self.blocks.tokens:
            self._codes.native.encode(blocks.native, self.blocks.tokens)
        self.blocks = blocks

    def search(
        self,
        queries: Queries,
        retrieval: Retrieval,
        *,
        estimate_tail: bool = False,
        tight: bool = False,
        give_up: bool = False,
    ) -> SearchResult:
        """See `indexes.base.Index`. tight: reads every visible key, so that `missed` and its bound are exact.

        estimate_tail: tokens are chosen by their codes alone, without a margin, for those that are not count all the same.
        give_up: a KV head of which a query wants more than a quarter of its tokens is given up. TopP: queries.outside counts to
        the mass, and as found; the share is that of the estimates. Raises ValueError.
        """
        if not isfinite(queries.scale) or queries.scale <= 0:
            raise ValueError(f"scale is {queries.scale}; expected a positive number")
        if np.isnan(queries.outside).any() or np.isposinf(queries.outside).any():
            raise ValueError("outside holds NaN or infinity; expected finite numbers, or -inf for none")
        number, parameter = kernel_parameter(retrieval, queries.scale, self.blocks.tokens)
        offsets, ids, scores, scanned, nbytes, missed, bound, tails, dense = self._codes.native.search(
            self.blocks.native,
            queries.native,
            number,
            parameter,
            queries.scale,
            0.0 if estimate_tail else MARGIN,
            queries.outside,
            estimate_tail,
            tight,
            give_up,
        )
        shape = queries.q.shape[:2]
        tail = tails.reshape(queries.q.shape) if estimate_tail else None
        flags = dense.view(np.bool_).reshape(shape) if give_up else None
        return SearchResult(offsets, ids, scores, scanned, nbytes, missed.reshape(shape), bound.reshape(shape), tail, flags)

    def searcher(self, retrieval: Retrieval, scale: float, *, estimate_tail: bool) -> Searcher | None:
        """See `indexes.searcher.searcher_of`."""
        number, parameter = kernel_parameter(retrieval, scale, self.blocks.tokens)
        margin = 0.0 if estimate_tail else MARGIN
        return Searcher(self._codes.native.searcher(self.blocks.native, number, parameter, scale, margin, estimate_tail))

    def verify(self) -> None:
        """Code the keys and values again, and compare. Raises IndexCorrupt."""
        wrong = self._codes.native.verify(self.blocks.native)
        if wrong:
            raise IndexCorrupt(f"{wrong} chunks of codes are not those of their keys and values; build the index again")

    def save(self, path: Path) -> None:
        """See `indexes.base.Index`. Raises OSError."""
        header = {"blocks": self.blocks.identity(), "format": FORMAT}
        file.write(path, self.kind, header, self._codes.arrays(chunks_of(self.blocks.tokens)))

    @classmethod
    def load(cls, path: Path, blocks: Blocks) -> Self:
        """See `indexes.base.Index`. Raises IndexCorrupt, OSError."""
        header, arrays = file.read(path, cls.kind)
        file.check_blocks(path, header, blocks)
        if header.get("format") != FORMAT:
            raise IndexCorrupt(f"{path} holds codes of format {header.get('format')!r}; expected {FORMAT}: build the index again")
        expected = Codes.empty(blocks.kv_heads, blocks.head_dim, chunks_of(blocks.tokens)).arrays(None)
        for name, array in expected.items():
            if name not in arrays or (arrays[name].shape, arrays[name].dtype) != (array.shape, array.dtype):
                raise IndexCorrupt(f"{path} holds no {name} of shape {array.shape}; build the index again")
        return cls(blocks, Codes(**{name: arrays[name] for name in expected}))

    def cost(
        self, tokens: int, rows: int, retrieval: Retrieval, *, expected_tokens: float | None = None, heads: int | None = None
    ) -> Cost:
        """See `indexes.base.Index`, and `indexes.quantized.cost` for the formula."""
        active = self.blocks.kv_heads if heads is None else heads
        return _cost.of(self.blocks, tokens, rows, active, retrieval, expected_tokens)
