"""The coarse index on the device: channel bounds of small pages of keys (Quest, arXiv 2406.10774), scores by them,
and attention over the pages with the largest scores."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvdb.attention.triton.gather import gather
from kvdb.attention.triton.pages import Pages, Runs, check_numbers
from kvdb.attention.triton.select import kth_largest, log_missed_mass, select_pages
from kvdb.attention.triton.tile import load_rows, padded, stored, up
from kvdb.attention.triton.workspace import Partials, Selection
from kvdb.storage.slot import BOUND_TOKENS, SlotLayout

SCORED = 64
"""The number of pages that one program scores."""


@triton.jit
def _bounds_kernel(
    elements, floats, halves, slots, counts,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, STRIDE: tl.constexpr, SCALES_AT: tl.constexpr,
    SCALES_STRIDE: tl.constexpr, QUANTISED: tl.constexpr, FLOAT8: tl.constexpr, BOUNDS_AT: tl.constexpr, PAGES: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    count = tl.load(counts + tl.program_id(0))
    head = tl.program_id(1)
    page = tl.program_id(2)
    dim = tl.arange(0, DIMS)
    token = page * TOKENS + tl.arange(0, TOKENS)
    inside = (token < count) & (token < BLOCK_SIZE)
    row = head * BLOCK_SIZE + token
    scales = floats + slot * SCALES_STRIDE + SCALES_AT + row
    x = load_rows(elements + slot * STRIDE + row * HEAD_DIM, scales, inside, dim, dim < HEAD_DIM, QUANTISED, FLOAT8)
    some = page * TOKENS < count
    most = tl.where(some, tl.max(tl.where(inside[:, None], x, float("-inf")), 0), 0.0)
    least = tl.where(some, tl.min(tl.where(inside[:, None], x, float("inf")), 0), 0.0)
    to = halves + slot * (SCALES_STRIDE * 2) + BOUNDS_AT + (head * PAGES + page) * (2 * HEAD_DIM) + dim
    tl.store(to, (-up(-least)).to(tl.bfloat16), mask=dim < HEAD_DIM)
    tl.store(to + HEAD_DIM, up(most).to(tl.bfloat16), mask=dim < HEAD_DIM)


@triton.jit
def _rows(q, group, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr):
    """The query rows of a group, float32 `[ROWS, DIMS]`."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    mask = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(q + (group * GROUP + row)[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _score_bounds_kernel(
    q, halves, table, begin, tokens, out, pages_max,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    ROWS: tl.constexpr, STRIDE: tl.constexpr, BOUNDS_AT: tl.constexpr, PAGES: tl.constexpr, TOKENS: tl.constexpr,
    SCORED: tl.constexpr, MATH: tl.constexpr, LOSES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    group = sequence * KV_HEADS + head
    page = tl.program_id(0) * SCORED + tl.arange(0, SCORED)
    length = tl.load(tokens + sequence)
    within = page % PAGES
    inside = page // PAGES * BLOCK_SIZE + within * TOKENS < length
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    slot = tl.load(table + tl.load(begin + sequence) + page // PAGES, mask=inside, other=0).to(tl.int64)
    at = halves + slot[:, None] * STRIDE + (BOUNDS_AT + (head * PAGES + within) * (2 * HEAD_DIM))[:, None] + dim[None, :]
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    least = tl.load(at, mask=mask, other=0.0).to(MATH)
    most = tl.load(at + HEAD_DIM, mask=mask, other=0.0).to(MATH)
    queries = _rows(q, group, GROUP, HEAD_DIM, DIMS, ROWS)
    score = tl.dot(tl.maximum(queries, 0.0).to(MATH), tl.trans(most), input_precision="ieee")
    score = tl.dot(tl.minimum(queries, 0.0).to(MATH), tl.trans(least), score, input_precision="ieee")
    if LOSES:  # what MATH takes from a query, at its worst
        lost = tl.abs(queries - queries.to(MATH).to(tl.float32)) * 1.01
        score = tl.dot(lost.to(MATH), tl.trans(tl.maximum(tl.abs(least), tl.abs(most))), score, input_precision="ieee")
    to = out + (group * GROUP + row[:, None]).to(tl.int64) * pages_max + page[None, :]
    score = tl.where(inside[None, :], score, float("-inf"))
    tl.store(to, score, mask=(row < GROUP)[:, None] & (page < pages_max)[None, :])


def bounds(pages: Pages, slots: torch.Tensor, counts: torch.Tensor) -> None:
    """Write the channel bounds of slots from the keys in them, as `blocks.load` gives them, rounded outwards.

    slots: int32 `[n]`, counts: int32 `[n]`, tokens of each, on the device. Raises ValueError where shapes or dtypes are wrong.
    """
    layout = pages.layout
    check_numbers(pages, slots=slots, counts=counts)
    if len(slots):
        _bounds_kernel[(len(slots), layout.kv_heads, layout.pages)](
            stored(pages), pages.floats, pages.halves, slots, counts,
            BLOCK_SIZE=layout.block_size, HEAD_DIM=layout.head_dim, DIMS=padded(layout.head_dim),
            STRIDE=layout.nbytes // pages.elements.element_size(), SCALES_AT=layout.scales_at // 4,
            SCALES_STRIDE=layout.nbytes // 4, QUANTISED=layout.quantised, FLOAT8=layout.format == "float8",
            BOUNDS_AT=layout.bounds_at // 2, PAGES=layout.pages, TOKENS=BOUND_TOKENS,
        )  # fmt: skip


def score_bounds(q: torch.Tensor, pages: Pages, runs: Runs, out: torch.Tensor) -> None:
    """Write the largest q.k that any key of a page can have, by its channel bounds; minus infinity behind a sequence's last page.

    q: `[sequences, q_heads, head_dim]`, contiguous. out: float32 `[sequences, q_heads, pages]`, with at most as many pages as
    tokens_max tokens fill; pages are numbered block by block. Raises ValueError where shapes or dtypes are wrong.
    """
    layout = pages.layout
    group = _group_of(q, layout.kv_heads, layout.head_dim, out)
    if len(q) != runs.sequences:
        raise ValueError(f"q has {len(q)} sequences; expected {runs.sequences}")
    if out.numel():
        _score_bounds_kernel[(triton.cdiv(out.shape[2], SCORED), layout.kv_heads, len(q))](
            q, pages.halves, runs.table, runs.begin, runs.tokens, out, out.shape[2],
            GROUP=group, KV_HEADS=layout.kv_heads, BLOCK_SIZE=layout.block_size, HEAD_DIM=layout.head_dim,
            DIMS=padded(layout.head_dim), ROWS=max(16, triton.next_power_of_2(group)), STRIDE=layout.nbytes // 2,
            BOUNDS_AT=layout.bounds_at // 2, PAGES=layout.pages, TOKENS=BOUND_TOKENS, SCORED=SCORED, MATH=pages.math,
            LOSES=q.dtype == torch.float32 and pages.math != tl.float32,
        )  # fmt: skip


@dataclass(frozen=True)
class CoarseWorkspace:
    """The memory of a search for the best pages, allocated once for a number of sequences and tokens. scores: float32
    `[sequences, q_heads, pages]`. threshold, sums: float32 `[sequences, q_heads]`; sums are zero between queries."""

    selection: Selection
    partials: Partials
    scores: torch.Tensor
    threshold: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def of(
        cls, layout: SlotLayout, sequences: int, q_heads: int, tokens_max: int, k_pages: int, device: torch.device
    ) -> "CoarseWorkspace":
        """Allocate one for at most k_pages of each query head. The pages of a group always fit, unless scores tie."""
        heads = layout.kv_heads
        pages = -(-tokens_max // layout.block_size) * layout.pages
        capacity = max(1, min(pages, k_pages * (q_heads // heads)))
        rows = torch.zeros((4, sequences, q_heads), dtype=torch.float32, device=device)
        ids = torch.empty((sequences, heads, capacity), dtype=torch.int32, device=device)
        selection = Selection(ids, torch.zeros((sequences, heads), dtype=torch.int32, device=device), rows[0], rows[0])
        scores = torch.empty((sequences, q_heads, pages), dtype=torch.float32, device=device)
        partials = Partials.of(sequences, q_heads, heads, layout.head_dim, device)
        return cls(selection, partials, scores, rows[1], rows[2])

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that it holds on the device."""
        return *self.selection.tensors(), *self.partials.tensors(), self.scores, self.threshold, self.sums


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
) -> Selection:
    """Attention over the k_pages pages of each query head whose bounds promise most, and over those of the other heads of its
    group: out as q, lse (and top, the largest q.k) float32 `[sequences, q_heads]`. Nothing goes to the host between the launches.

    Returns what was read: pages. `missed` is `missed_bound`, by the bounds of the pages that were not read. Raises ValueError
    where shapes or dtypes are wrong.
    """
    selection, scores = workspace.selection, workspace.scores
    if scores.shape[:2] != q.shape[:2] or scores.shape[2] * BOUND_TOKENS < runs.tokens_max or scale <= 0:
        made = f"{tuple(scores.shape[:2])} heads of {scores.shape[2]} pages"
        raise ValueError(f"the workspace is for {made}; the query has {tuple(q.shape[:2])} of {runs.tokens_max} tokens")
    score_bounds(q, pages, runs, scores)
    kth_largest(scores, k_pages, workspace.threshold)
    select_pages(
        selection.ids, selection.counts, scores, workspace.threshold, q.shape[1] // pages.layout.kv_heads, workspace.sums, scale
    )
    log_missed_mass(
        workspace.threshold, selection.counts, selection.ids.shape[2], workspace.sums, scale, BOUND_TOKENS, selection.missed_bound
    )
    gather(workspace.partials, q, pages, runs, (selection.ids, selection.counts), BOUND_TOKENS, scale, out, lse, top)
    return selection


def _group_of(q: torch.Tensor, heads: int, dim: int, out: torch.Tensor) -> int:
    if q.ndim != 3 or q.shape[1] % heads or q.shape[2] != dim or not q.is_contiguous():
        raise ValueError(f"q is {tuple(q.shape)}; expected contiguous (sequences, a multiple of {heads}, {dim})")
    if out.dtype != torch.float32 or out.ndim != 3 or out.shape[:2] != q.shape[:2] or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; expected contiguous float32 of {tuple(q.shape[:2])} heads")
    return int(q.shape[1] // heads)
