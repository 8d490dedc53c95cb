"""Clusters of similar keys, found segment by segment (RetroInfer's wave index, arXiv 2505.02922)."""

from typing import Self

from indexes.accelerate import Accelerator
from indexes.base import BuildCost, Float32
from indexes.blocks import Blocks
from indexes.coarse.cost import PageCost
from indexes.coarse.index import PagedIndex
from indexes.coarse.layout import PageLayout


class Clusters(PagedIndex):
    """An approximate index: a cluster is read when its centroid's score plus a share of the cluster's reach, the margin, comes up
    to the threshold.

    Tokens that are found have exact scores; with margin 1 nothing is overlooked. No key of a cluster scores above centroid plus
    reach, and few come near it: a margin a little below 1 skips most of the clusters that hold nothing, and skips more of them
    the longer the context is. TopP reads on until the bounds of the unread clusters say that the share is reached. Attention over
    the unread clusters can be estimated (`estimate_tail`): the weight of the centroid times the visible tokens, with their mean
    value.
    """

    kind = "coarse-clusters"
    accelerated = True
    estimates_tail = True

    page_cost = PageCost(scan=5.5, tokens=250.0, growth=0.05, apart=1, score=4.7, rank_page=500.0, ranked=30.0, ranked_power=1.0)

    @classmethod
    def build(  # noqa: PLR0913, settings by name
        cls,
        blocks: Blocks,
        query_samples: Float32 | None = None,  # noqa: ARG003, pages need none
        page_size: int = 32,
        segment_tokens: int = 8192,
        margin: float = 0.8,
        iterations: int = 10,
        far: float = 0.5,
        *,
        accelerator: Accelerator | None = None,
    ) -> Self:
        """Cluster all keys of `blocks`. page_size: tokens for each centroid. margin: the share of its reach that a cluster is
        given, 0 to 1. accelerator: the device that finds the clusters, None for the CPU. Raises ValueError."""
        layout = PageLayout(page_size, segment_tokens, margin, clustered=True, values=True, iterations=iterations, far=far)
        return cls._build(blocks, layout, accelerator)

    @classmethod
    def build_cost(cls, tokens: int, kv_heads: int, head_dim: int) -> BuildCost:
        """See `indexes.registry.Priced`; the figures are those of benchmarks/README.md."""
        keys = tokens * kv_heads
        return BuildCost(28e-9 * keys * head_dim, keys * (0.094 * head_dim + 3), 0.05)
