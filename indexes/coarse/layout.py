"""How tokens are cut into segments, and segments into pages, and the arrays that are kept of each page."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import indexes._native as _native
from indexes.accelerate import Accelerator, AcceleratorLost, Clusters, KMeans
from indexes.blocks import Blocks
from indexes.file import Shapes

Array = npt.NDArray[Any]

GROUP = 16
"""The number of pages of a segment is padded to a multiple of this: the codes of a group of pages lie together, as lanes of a
vector."""
CHANNEL_BLOCKS = 8
"""The number of parts of a key whose residuals have bounds of their own."""
SEGMENT_TOKENS_MAX = 65536
"""The members of a segment's pages are numbered with 16 bits."""


@dataclass(frozen=True)
class PageLayout:
    """What an index keeps of each page, and how it searches.

    page_size: tokens of a page, or of a cluster on average. segment_tokens: the number of tokens that are cut into pages, or
    clustered, at once. box: whether bounds of each channel are kept instead of means. farthest: whether the key farthest from the
    mean is kept too. clustered: whether pages are clusters of k-means instead of runs of tokens; there are `iterations` rounds,
    and the share `far` of the centroids starts at the keys farthest from the others. values: whether the mean value is kept too.
    margin: the share of its reach that a page is given when its best token is guessed; with 1 nothing is overlooked. exact:
    whether a page is never given less than the margin, however much is read.
    """

    page_size: int
    segment_tokens: int
    margin: float
    exact: bool = False
    box: bool = False
    farthest: bool = False
    clustered: bool = False
    values: bool = False
    iterations: int = 1
    far: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= self.segment_tokens:
            raise ValueError(f"page_size is {self.page_size}; expected 1 to segment_tokens, {self.segment_tokens}")
        if not self.segment_tokens <= SEGMENT_TOKENS_MAX:
            raise ValueError(f"segment_tokens is {self.segment_tokens}; expected at most {SEGMENT_TOKENS_MAX}")
        if not 0 <= self.margin <= 1:
            raise ValueError(f"margin is {self.margin}; expected 0 to 1, a share of the reach of a page")
        if self.iterations < 1 or not 0 <= self.far < 1:
            raise ValueError(f"iterations is {self.iterations}, far is {self.far}; expected at least 1, and a share below 1")

    def page_nbytes(self, head_dim: int) -> int:
        """The number of bytes of each page that a scan reads."""
        center = (2 if self.box else 1) * head_dim + 4
        return center + (0 if self.box else CHANNEL_BLOCKS + 4) + (head_dim + 4 if self.farthest else 0)


class PageBatch:
    """Adjacent segments of equal length: tokens [begin, begin + segments * tokens)."""

    def __init__(
        self, layout: PageLayout, blocks: Blocks, begin: int, segments: int, tokens: int, arrays: dict[str, Array]
    ) -> None:
        """Raises ValueError for arrays that do not fit."""
        self.begin, self.segments, self.tokens, self.arrays = begin, segments, tokens, arrays
        fields = {
            "begin": begin,
            "segments": segments,
            "tokens": tokens,
            "pages": _padded(-(-tokens // layout.page_size)),
            "kv_heads": blocks.kv_heads,
            "head_dim": blocks.head_dim,
            "value_dim": blocks.value_dim,
            "box": int(layout.box),
            "page_tokens": layout.page_size,
        }
        self.native = _native.CoarsePages(fields, arrays)

    @classmethod
    def build(
        cls, layout: PageLayout, blocks: Blocks, begin: int, segments: int, tokens: int, accelerator: Accelerator | None = None
    ) -> "PageBatch":
        """Compute the arrays from the keys and values of tokens [begin, begin + segments * tokens)."""
        expected = shapes(layout, blocks, segments, tokens)
        arrays: dict[str, Array] = {name: np.empty(shape, dtype) for name, (shape, dtype) in expected.items()}
        batch = cls(layout, blocks, begin, segments, tokens, arrays)
        clusters = -(-tokens // layout.page_size)
        nearest = None
        if layout.clustered and accelerator is not None:
            how = KMeans.of(tokens, clusters, layout.iterations, layout.far)
            nearest = _clustered(accelerator, blocks, begin, batch.end, how)
        _native.coarse_build(blocks.native, batch.native, clusters, layout.iterations, layout.far, nearest)
        return batch

    @property
    def end(self) -> int:
        return self.begin + self.segments * self.tokens

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def shapes(layout: PageLayout, blocks: Blocks, segments: int, tokens: int) -> Shapes:
    """The shape, `[segments, kv_heads, ...]`, and dtype of every array of a batch, by name."""
    pages, d = _padded(-(-tokens // layout.page_size)), blocks.head_dim
    each: dict[str, tuple[int, type[np.generic]]] = {
        "center": (pages * (2 if layout.box else 1) * d, np.uint8),
        "center_scales": (pages, np.float32),
        "first": (pages + 1, np.int32),
        "shift": (d, np.float32),
        "spread": (CHANNEL_BLOCKS, np.float32),
        "norm": (1, np.float32),
    }
    if not layout.box:
        each["radius"] = (pages * CHANNEL_BLOCKS, np.uint8)
        each["radius_scales"] = (pages, np.float32)
    if layout.farthest:
        each["farthest"] = (pages * d, np.uint8)
        each["farthest_scales"] = (pages, np.float32)
    if layout.clustered:
        each["members"] = (tokens, np.uint16)
    if layout.values:
        each["values"] = (pages * blocks.value_dim, np.uint16)
    return {name: ((segments, blocks.kv_heads, count), dtype) for name, (count, dtype) in each.items()}


def build_batches(layout: PageLayout, blocks: Blocks, begin: int, accelerator: Accelerator | None = None) -> list[PageBatch]:
    """Batches over tokens [begin, blocks.tokens): whole segments, then a short one with the rest.

    accelerator: the device that finds clusters, None for the CPU, which goes on where the device is lost.
    """
    whole, rest = divmod(blocks.tokens - begin, layout.segment_tokens)
    batches = []
    if whole:
        batches.append(PageBatch.build(layout, blocks, begin, whole, layout.segment_tokens, accelerator))
    if rest:
        batches.append(PageBatch.build(layout, blocks, blocks.tokens - rest, 1, rest, accelerator))
    return batches


def insert_batches(layout: PageLayout, blocks: Blocks, batches: list[PageBatch]) -> list[PageBatch]:
    """The batches, extended by the tokens of `blocks` that they do not hold yet.

    Short segments at the end are merged with the new tokens if they are no longer than what follows them. So few short segments
    pile up, and a token is indexed again only when its segment at least doubles.
    """
    kept = list(batches)
    begin = kept[-1].end if kept else 0
    while kept and kept[-1].tokens < layout.segment_tokens and kept[-1].tokens <= blocks.tokens - begin:
        begin = kept.pop().begin
    return kept + build_batches(layout, blocks, begin)


def _clustered(accelerator: Accelerator, blocks: Blocks, begin: int, end: int, how: KMeans) -> Clusters | None:
    """The cluster of each token, uint16 `[segments, kv_heads, tokens]`; None where the accelerator was lost."""
    heads = (blocks.stored_keys(head, begin, end) for head in range(blocks.kv_heads))
    try:
        return np.stack(list(accelerator.clusters(heads, how)), axis=1)
    except AcceleratorLost:
        return None


def _padded(pages: int) -> int:
    return -(-pages // GROUP) * GROUP
