"""Pages with the largest and the smallest value of every channel (Quest, arXiv 2406.10774)."""

from typing import Self

from indexes.base import BuildCost, Float32
from indexes.blocks import Blocks
from indexes.coarse.cost import PageCost
from indexes.coarse.index import PagedIndex
from indexes.coarse.layout import PageLayout


class Bounds(PagedIndex):
    """An exact index: no q.k of a page exceeds q+ . max + q- . min, so a page whose bound is below the threshold holds nothing.

    Every retrieval finds what brute force finds. Keys that differ in many channels make the bound loose, and then most pages are
    read: this kind is exact, but saves little.
    """

    kind = "coarse-bounds"
    page_cost = PageCost(scan=1.25, tokens=5000.0, growth=0.225, apart=16, score=6.0, rank_page=1300.0, ranked=None)

    @classmethod
    def build(
        cls,
        blocks: Blocks,
        query_samples: Float32 | None = None,  # noqa: ARG003, pages need none
        page_size: int = 16,
        segment_tokens: int = 8192,
    ) -> Self:
        """Build an index over all keys of `blocks`. Raises ValueError for sizes that do not fit."""
        return cls._build(blocks, PageLayout(page_size, segment_tokens, margin=1.0, exact=True, box=True))

    @classmethod
    def build_cost(cls, tokens: int, kv_heads: int, head_dim: int) -> BuildCost:
        """See `indexes.registry.Priced`; the figures are those of benchmarks/README.md."""
        keys = tokens * kv_heads
        return BuildCost(0.7e-9 * keys * head_dim, keys * (head_dim / 8 + 1), 0.5)
