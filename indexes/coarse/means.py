"""Pages with their mean key and the key farthest from it (after InfLLM, arXiv 2402.04617)."""

from typing import Self

from indexes.base import BuildCost, Float32, Queries, SearchResult
from indexes.blocks import Blocks
from indexes.coarse.cost import PageCost
from indexes.coarse.index import PagedIndex
from indexes.coarse.layout import PageLayout
from indexes.retrieval import Retrieval, TopP
from indexes.searcher import Searcher
from indexes.top_p import top_p_by_ranges


class Means(PagedIndex):
    """An approximate index: a page is read when the score of its farthest key, or the score of its mean plus a share of its
    reach, the margin, comes up to the threshold.

    Tokens that are found have exact scores, but a token that scores above the threshold while neither of the two does is
    overlooked; `missed_bound` counts it. Tokens that matter may lie scattered, one or two in a page, so pages are small and the
    margin is large.
    """

    kind = "coarse-means"

    page_cost = PageCost(scan=1.9, tokens=1000.0, growth=0.3, apart=8, score=4.7, rank_page=1300.0, ranked=100.0)

    @classmethod
    def build(
        cls,
        blocks: Blocks,
        query_samples: Float32 | None = None,  # noqa: ARG003, pages need none
        page_size: int = 8,
        segment_tokens: int = 8192,
        margin: float = 0.7,
    ) -> Self:
        """Build an index over all keys of `blocks`. margin: the share of its reach that a page is given, 0 to 1; 1 overlooks
        nothing. Raises ValueError for sizes that do not fit."""
        return cls._build(blocks, PageLayout(page_size, segment_tokens, margin, farthest=True))

    def search(
        self, queries: Queries, retrieval: Retrieval, *, estimate_tail: bool = False, tight: bool = False, give_up: bool = False
    ) -> SearchResult:
        """See `PagedIndex.search`. TopP is searched by ranges, because a mean says nothing about the mass of a page in which one
        token stands out. The result has the share p if the estimates of what was missed are right."""

        def search(some: Queries, of: Retrieval) -> SearchResult:
            return super(Means, self).search(some, of, estimate_tail=estimate_tail, tight=tight, give_up=give_up)

        return top_p_by_ranges(search, queries, retrieval.p) if isinstance(retrieval, TopP) else search(queries, retrieval)

    def searcher(self, retrieval: Retrieval, scale: float, *, estimate_tail: bool) -> Searcher | None:
        """See `indexes.searcher.searcher_of`; None for TopP, which takes several searches."""
        return None if isinstance(retrieval, TopP) else super().searcher(retrieval, scale, estimate_tail=estimate_tail)

    @classmethod
    def build_cost(cls, tokens: int, kv_heads: int, head_dim: int) -> BuildCost:
        """See `indexes.registry.Priced`; the figures are those of benchmarks/README.md."""
        keys = tokens * kv_heads
        return BuildCost(1.2e-9 * keys * head_dim, keys * (head_dim / 4 + 3), 0.3)
