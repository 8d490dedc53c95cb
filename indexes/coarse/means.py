"""Pages with their mean key and the key farthest from it (after InfLLM, arXiv 2402.04617)."""

from typing import Self

from indexes.base import BuildCost, Float32, Found, Queries
from indexes.blocks import Blocks
from indexes.coarse.layout import Layout
from indexes.coarse.paged import Paged
from indexes.coarse.work import Work
from indexes.mass import reach_mass
from indexes.retrieval import Retrieval, TopP


class Means(Paged):
    """Approximate: a page is read when its farthest key, or its mean and a margin of its reach, comes up to the threshold.

    What is found has exact scores, but a token that is neither is overlooked; `missed_bound` counts it. Where tokens that matter
    are strewn singly, as few of a page as one or two may stand out from its mean: hence small pages and a large margin.
    """

    kind = "coarse-means"

    work = Work(
        scan=1.9,
        tokens=1000.0,
        growth=0.3,
        apart=8,
        score=4.7,
        rank_page=1300.0,
        ranked=100.0,
    )

    @classmethod
    def build(
        cls,
        blocks: Blocks,
        samples: Float32 | None = None,  # noqa: ARG003, pages need none
        page_size: int = 8,
        segment_tokens: int = 8192,
        margin: float = 0.7,
    ) -> Self:
        """margin: a page's share of its reach, 0 to 1; 1 overlooks nothing. Raises ValueError for sizes that do not fit."""
        return cls._build(blocks, Layout(page_size, segment_tokens, margin, farthest=True))

    def search(
        self,
        queries: Queries,
        retrieval: Retrieval,
        *,
        estimate_tail: bool = False,
        tight: bool = False,
        give_up: bool = False,
    ) -> Found:
        """See `Paged.search`. A mean says nothing of the mass of a page in which one token stands out, so TopP goes by ranges."""

        def search(asked: Queries, of: Retrieval) -> Found:
            return super(Means, self).search(asked, of, estimate_tail=estimate_tail, tight=tight, give_up=give_up)

        return reach_mass(search, queries, retrieval.p) if isinstance(retrieval, TopP) else search(queries, retrieval)

    @classmethod
    def build_cost(cls, tokens: int, kv_heads: int, head_dim: int) -> BuildCost:
        """See `indexes.registry.Priced`; the figures are those of benchmarks/README.md."""
        keys = tokens * kv_heads
        return BuildCost(1.2e-9 * keys * head_dim, keys * (head_dim / 4 + 3), 0.3)
