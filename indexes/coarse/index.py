"""The class under all coarse kinds: every verb of an index, over batches of pages."""

from abc import ABC
from dataclasses import asdict, fields
from pathlib import Path
from typing import ClassVar, Self

import indexes._native as _native
from indexes import file
from indexes.accelerate import Accelerator
from indexes.base import Ask, Cost, IndexCorrupt, Queries, SearchResult, unlimited
from indexes.blocks import Blocks
from indexes.coarse.cost import PageCost
from indexes.coarse.layout import PageBatch, PageLayout, build_batches, insert_batches, shapes
from indexes.retrieval import Retrieval, kernel_parameter
from indexes.searcher import Searcher


class PagedIndex(ABC):
    """Pages with representatives. A kind says what it keeps of each (`PageLayout`), and what a search costs (`page_cost`)."""

    kind: ClassVar[str]
    walks: ClassVar[bool] = False
    estimates_tail: ClassVar[bool] = False
    page_cost: ClassVar[PageCost]

    def __init__(self, blocks: Blocks, layout: PageLayout, batches: list[PageBatch]) -> None:
        self.blocks = blocks
        self.layout = layout
        self._batches = batches

    @classmethod
    def _build(cls, blocks: Blocks, layout: PageLayout, accelerator: Accelerator | None = None) -> Self:
        return cls(blocks, layout, build_batches(layout, blocks, 0, accelerator))

    @property
    def nbytes(self) -> int:
        return sum(batch.nbytes for batch in self._batches)

    def insert(self, blocks: Blocks) -> None:
        """See `Index.insert`. Raises ValueError for blocks that do not begin with the tokens indexed before."""
        blocks.check_extends(self.blocks)
        if blocks.tokens > self.blocks.tokens:
            self._batches = insert_batches(self.layout, blocks, self._batches)
        self.blocks = blocks

    def search(
        self, queries: Queries, retrieval: Retrieval, *, estimate_tail: bool = False, tight: bool = False, give_up: bool = False
    ) -> SearchResult:
        """See `Index.search`. tight: reads every visible key, so that `missed` and its bound are exact.

        give_up: after the scan of the representatives, all queries of a KV head are given up where the pages to be read hold so
        many tokens that reading everything costs less; the other heads are searched with the whole margin. TopP: the mass in
        queries.outside counts as found. Raises ValueError.
        """
        tail = estimate_tail and self.layout.values
        fields = _native.coarse_search(
            self.blocks.native,
            [batch.native for batch in self._batches],
            queries.native,
            *kernel_parameter(retrieval, queries.scale, self.blocks.tokens),
            queries.scale,
            self.layout.margin,
            self.layout.exact,
            queries.outside,
            tail,
            tight,
            give_up,
        )
        return SearchResult.of_kernel(queries, fields, tail=tail, give_up=give_up)

    def searcher(self, retrieval: Retrieval, scale: float, *, estimate_tail: bool) -> Searcher | None:
        """See `indexes.searcher.searcher_of`."""
        number_and_parameter = kernel_parameter(retrieval, scale, self.blocks.tokens)
        pages, layout = [batch.native for batch in self._batches], self.layout
        tail = estimate_tail and layout.values
        return Searcher(
            _native.coarse_searcher(self.blocks.native, pages, *number_and_parameter, scale, layout.margin, layout.exact, tail)
        )

    def verify(self) -> None:
        """Compute the arrays of each page anew from its keys and values, and compare. Raises IndexCorrupt."""
        for batch in self._batches:
            try:
                right = _native.coarse_verify(self.blocks.native, batch.native)
            except ValueError as error:
                raise IndexCorrupt(f"pages of tokens [{batch.begin}, {batch.end}): {error}") from error
            if not right:
                raise IndexCorrupt(f"pages of tokens [{batch.begin}, {batch.end}) are not those of their keys")

    def save(self, path: Path, ask: Ask = unlimited) -> None:
        """See `Index.save`. Raises OSError."""
        header = {
            "blocks": self.blocks.identity(),
            "layout": asdict(self.layout),
            "batches": [[batch.begin, batch.segments, batch.tokens] for batch in self._batches],
        }
        arrays = {f"{i}.{name}": a for i, batch in enumerate(self._batches) for name, a in batch.arrays.items()}
        file.write(path, self.kind, header, arrays, ask)

    @classmethod
    def load(cls, path: Path, blocks: Blocks) -> Self:
        """See `Index.load`. Raises IndexCorrupt, OSError."""
        header, arrays = file.read(path, cls.kind)
        file.check_blocks(path, header, blocks)
        try:
            layout = PageLayout(**{item.name: header["layout"][item.name] for item in fields(PageLayout)})
            batches = []
            for i, (begin, segments, tokens) in enumerate(header["batches"]):
                expected = shapes(layout, blocks, segments, tokens)
                held = file.checked_arrays(path, arrays, expected, prefix=f"{i}.")
                batches.append(PageBatch(layout, blocks, begin, segments, tokens, held))
                batches[-1].native.check()
        except IndexCorrupt:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise IndexCorrupt(f"{path} does not hold what its header says ({error}); build the index again") from error
        ends = [0, *(batch.end for batch in batches)]
        if [batch.begin for batch in batches] != ends[:-1] or ends[-1] != blocks.tokens:
            raise IndexCorrupt(f"{path} does not hold every token once; build the index again")
        return cls(blocks, layout, batches)

    def cost(
        self, tokens: int, rows: int, retrieval: Retrieval, *, expected_tokens: float | None = None, heads: int | None = None
    ) -> Cost:
        """See `Index.cost`, and `PageCost.of` for the formula."""
        active = self.blocks.kv_heads if heads is None else heads
        return self.page_cost.of(self.layout, self.blocks, (tokens, rows, active), retrieval, expected_tokens)
