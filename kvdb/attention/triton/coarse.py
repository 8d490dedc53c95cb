"""The coarse index on the device: channel bounds of small pages of keys (Quest, arXiv 2406.10774), scores by them and by
centroids, and attention over the pages with the largest scores."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvdb.attention.triton.gather import gather_into
from kvdb.attention.triton.pages import INTERPRETED, Pages, Runs
from kvdb.attention.triton.select import kth, left, within_into
from kvdb.attention.triton.tile import padded, stored, widen
from kvdb.attention.triton.workspace import Found, Partials
from kvdb.storage.slot import BOUND_TOKENS, SlotLayout

PAGES = 64
"""Pages that a program scores together."""
_MATH = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _bounds_kernel(
    elements, floats, halves, slots, counts,
    BLOCK: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, STRIDE: tl.constexpr, SCALES: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, QUANTISED: tl.constexpr, FLOAT8: tl.constexpr, BOUNDS: tl.constexpr, PAGES: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    count = tl.load(counts + tl.program_id(0))
    head = tl.program_id(1)
    page = tl.program_id(2)
    dim = tl.arange(0, DIMS)
    token = page * TOKENS + tl.arange(0, TOKENS)
    inside = (token < count) & (token < BLOCK)
    mask = inside[:, None] & (dim < DIM)[None, :]
    x = tl.load(elements + slot * STRIDE + (head * BLOCK + token)[:, None] * DIM + dim[None, :], mask=mask, other=0)
    x = widen(x, FLOAT8, tl.float32)
    if QUANTISED:
        x *= tl.load(floats + slot * SCALE_STRIDE + SCALES + head * BLOCK + token, mask=inside, other=0.0)[:, None]
    some = page * TOKENS < count
    most = tl.where(some, tl.max(tl.where(inside[:, None], x, float("-inf")), 0), 0.0)
    least = tl.where(some, tl.min(tl.where(inside[:, None], x, float("inf")), 0), 0.0)
    # To bfloat16 outwards: what is cut off a number brings it nearer to zero.
    most_bits = most.to(tl.int32, bitcast=True)
    most_bits = tl.where(most > 0, most_bits + 0xFFFF, most_bits) & -0x10000
    least_bits = least.to(tl.int32, bitcast=True)
    least_bits = tl.where(least < 0, least_bits + 0xFFFF, least_bits) & -0x10000
    to = halves + slot * (SCALE_STRIDE * 2) + BOUNDS + (head * PAGES + page) * (2 * DIM) + dim
    tl.store(to, least_bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=dim < DIM)
    tl.store(to + DIM, most_bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=dim < DIM)


@triton.jit
def _rows(q, group, GROUP: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr):
    """The query rows of a group, float32 `[ROWS, DIMS]`."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    mask = (row < GROUP)[:, None] & (dim < DIM)[None, :]
    return tl.load(q + (group * GROUP + row)[:, None] * DIM + dim[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _score_bounds_kernel(
    q, halves, table, begin, tokens, out, pages_max,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
    STRIDE: tl.constexpr, BOUNDS: tl.constexpr, PAGES: tl.constexpr, TOKENS: tl.constexpr, N: tl.constexpr, MATH: tl.constexpr,
    LOSES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    group = sequence * HEADS + head
    page = tl.program_id(0) * N + tl.arange(0, N)
    length = tl.load(tokens + sequence)
    within = page % PAGES
    inside = page // PAGES * BLOCK + within * TOKENS < length
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    slot = tl.load(table + tl.load(begin + sequence) + page // PAGES, mask=inside, other=0).to(tl.int64)
    at = halves + slot[:, None] * STRIDE + (BOUNDS + (head * PAGES + within) * (2 * DIM))[:, None] + dim[None, :]
    mask = inside[:, None] & (dim < DIM)[None, :]
    least = tl.load(at, mask=mask, other=0.0).to(MATH)
    most = tl.load(at + DIM, mask=mask, other=0.0).to(MATH)
    queries = _rows(q, group, GROUP, DIM, DIMS, ROWS)
    score = tl.dot(tl.maximum(queries, 0.0).to(MATH), tl.trans(most), input_precision="ieee")
    score = tl.dot(tl.minimum(queries, 0.0).to(MATH), tl.trans(least), score, input_precision="ieee")
    if LOSES:  # what MATH takes from a query, at its worst
        lost = tl.abs(queries - queries.to(MATH).to(tl.float32)) * 1.01
        score = tl.dot(lost.to(MATH), tl.trans(tl.maximum(tl.abs(least), tl.abs(most))), score, input_precision="ieee")
    to = out + (group * GROUP + row[:, None]).to(tl.int64) * pages_max + page[None, :]
    score = tl.where(inside[None, :], score, float("-inf"))
    tl.store(to, score, mask=(row < GROUP)[:, None] & (page < pages_max)[None, :])


@triton.jit
def _score_centroids_kernel(
    q, centroids, counts, out, clusters,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    group = tl.program_id(2) * HEADS + head
    cluster = tl.program_id(0) * N + tl.arange(0, N)
    inside = cluster < tl.load(counts + head)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    at = centroids + (head * clusters + cluster).to(tl.int64)[:, None] * DIM + dim[None, :]
    x = tl.load(at, mask=inside[:, None] & (dim < DIM)[None, :], other=0.0).to(MATH)
    queries = _rows(q, group, GROUP, DIM, DIMS, ROWS)
    score = tl.where(inside[None, :], tl.dot(queries.to(MATH), tl.trans(x), input_precision="ieee"), float("-inf"))
    to = out + (group * GROUP + row[:, None]).to(tl.int64) * clusters + cluster[None, :]
    tl.store(to, score, mask=(row < GROUP)[:, None] & (cluster < clusters)[None, :])


def bounds(pages: Pages, slots: torch.Tensor, counts: torch.Tensor) -> None:
    """Writes the channel bounds of slots from the keys in them, as `blocks.load` gives them, rounded outwards.

    slots: int32 `[n]`, counts: int32 `[n]`, tokens of each, on the device. Raises ValueError where shapes or dtypes are wrong.
    """
    layout = pages.layout
    for name, x in (("slots", slots), ("counts", counts)):
        if x.dtype != torch.int32 or x.ndim != 1 or len(x) != len(slots) or x.device != pages.slab.device:
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; expected int32 on {pages.slab.device}")
    if len(slots):
        _bounds_kernel[(len(slots), layout.kv_heads, layout.pages)](
            stored(pages), pages.floats, pages.halves, slots, counts,
            BLOCK=layout.block_size, DIM=layout.head_dim, DIMS=padded(layout.head_dim),
            STRIDE=layout.nbytes // pages.elements.element_size(), SCALES=layout.scales_at // 4, SCALE_STRIDE=layout.nbytes // 4,
            QUANTISED=layout.quantised, FLOAT8=layout.format == "float8", BOUNDS=layout.bounds_at // 2, PAGES=layout.pages,
            TOKENS=BOUND_TOKENS,
        )  # fmt: skip


def score_bounds(q: torch.Tensor, pages: Pages, runs: Runs, out: torch.Tensor) -> None:
    """The largest q.k that any key of a page can have, by its channel bounds; minus infinity behind the last page of a sequence.

    q: `[sequences, q_heads, head_dim]`, contiguous. out: float32 `[sequences, q_heads, pages]`,
    pages at most as many as tokens_max
    fill; they are numbered block by block. Raises ValueError where shapes or
    dtypes are wrong.
    """
    layout = pages.layout
    group = _group_of(q, layout.kv_heads, layout.head_dim, out)
    if len(q) != runs.sequences:
        raise ValueError(f"q has {len(q)} sequences; expected {runs.sequences}")
    if out.numel():
        _score_bounds_kernel[(triton.cdiv(out.shape[2], PAGES), layout.kv_heads, len(q))](
            q, pages.halves, runs.table, runs.begin, runs.tokens, out, out.shape[2],
            GROUP=group, HEADS=layout.kv_heads, BLOCK=layout.block_size, DIM=layout.head_dim, DIMS=padded(layout.head_dim),
            ROWS=max(16, triton.next_power_of_2(group)), STRIDE=layout.nbytes // 2, BOUNDS=layout.bounds_at // 2,
            PAGES=layout.pages, TOKENS=BOUND_TOKENS, N=PAGES, MATH=pages.math,
            LOSES=q.dtype == torch.float32 and pages.math != tl.float32,
        )  # fmt: skip


def score_centroids(q: torch.Tensor, centroids: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    """q.c for the centroids of one segment that all sequences read; minus infinity behind the last of a KV head.

    q: `[sequences, q_heads, head_dim]`, contiguous. centroids: `[kv_heads, clusters, head_dim]`, contiguous, of any float dtype,
    float32 where they are to be multiplied as such. counts: int32 `[kv_heads]`. out: float32 `[sequences, q_heads, clusters]`.
    Raises ValueError where shapes or dtypes are wrong.
    """
    heads, clusters, dim = centroids.shape
    group = _group_of(q, heads, dim, out)
    if out.shape[2] != clusters or counts.dtype != torch.int32 or counts.shape != (heads,) or not centroids.is_contiguous():
        raise ValueError(
            f"out has {out.shape[2]} clusters and counts are {counts.dtype}; expected {clusters} and int32 ({heads},)"
        )
    if out.numel():
        _score_centroids_kernel[(triton.cdiv(clusters, PAGES), heads, len(q))](
            q, centroids, counts, out, clusters, GROUP=group, HEADS=heads, DIM=dim, DIMS=padded(dim),
            ROWS=max(16, triton.next_power_of_2(group)), N=PAGES, MATH=_MATH[torch.float32 if INTERPRETED else centroids.dtype],
        )  # fmt: skip


@dataclass(frozen=True)
class CoarseWorkspace:
    """Allocated once for so many sequences of at most so many tokens. scores: float32 `[sequences, q_heads, pages]`. threshold,
    sums: float32 `[sequences, q_heads]`, sums zero between queries."""

    found: Found
    partials: Partials
    scores: torch.Tensor
    threshold: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def of(
        cls, layout: SlotLayout, sequences: int, q_heads: int, tokens_max: int, k_pages: int, device: torch.device
    ) -> "CoarseWorkspace":
        """For k_pages at most of each query head: whatever they are, the pages of a group then fit, ties apart."""
        heads = layout.kv_heads
        pages = -(-tokens_max // layout.block_size) * layout.pages
        capacity = max(1, min(pages, k_pages * (q_heads // heads)))
        rows = torch.zeros((4, sequences, q_heads), dtype=torch.float32, device=device)
        ids = torch.empty((sequences, heads, capacity), dtype=torch.int32, device=device)
        found = Found(ids, torch.zeros((sequences, heads), dtype=torch.int32, device=device), rows[0], rows[0])
        scores = torch.empty((sequences, q_heads, pages), dtype=torch.float32, device=device)
        partials = Partials.of(sequences, q_heads, heads, layout.head_dim, device)
        return cls(found, partials, scores, rows[1], rows[2])


def coarse_top(
    q: torch.Tensor,
    pages: Pages,
    runs: Runs,
    scale: float,
    k_pages: int,
    workspace: CoarseWorkspace,
    out: torch.Tensor,
    lse: torch.Tensor,
    top: torch.Tensor | None = None,
) -> Found:
    """Attention over the k_pages pages of each query head whose bounds promise most, and over those of the other heads of its
    group: out as q, lse (and top, the largest q.k) float32 `[sequences, q_heads]`. Nothing goes to the host between the launches.

    Returns what was read: pages. `missed` is `missed_bound`, by the bounds of the pages that were not read. Raises ValueError
    where shapes or dtypes are wrong.
    """
    found, scores = workspace.found, workspace.scores
    if scores.shape[:2] != q.shape[:2] or scores.shape[2] * BOUND_TOKENS < runs.tokens_max or scale <= 0:
        made = f"{tuple(scores.shape[:2])} heads of {scores.shape[2]} pages"
        raise ValueError(f"the workspace is for {made}; the query has {tuple(q.shape[:2])} of {runs.tokens_max} tokens")
    score_bounds(q, pages, runs, scores)
    kth(scores, k_pages, workspace.threshold)
    within_into(found.ids, found.counts, scores, workspace.threshold, q.shape[1] // pages.layout.kv_heads, workspace.sums, scale)
    left(workspace.threshold, found.counts, found.ids.shape[2], workspace.sums, scale, BOUND_TOKENS, found.missed_bound)
    gather_into(workspace.partials, q, pages, runs, (found.ids, found.counts), BOUND_TOKENS, scale, out, lse, top)
    return found


def _group_of(q: torch.Tensor, heads: int, dim: int, out: torch.Tensor) -> int:
    if q.ndim != 3 or q.shape[1] % heads or q.shape[2] != dim or not q.is_contiguous():
        raise ValueError(f"q is {tuple(q.shape)}; expected contiguous (sequences, a multiple of {heads}, {dim})")
    if out.dtype != torch.float32 or out.ndim != 3 or out.shape[:2] != q.shape[:2] or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; expected contiguous float32 of {tuple(q.shape[:2])} heads")
    return int(q.shape[1] // heads)
