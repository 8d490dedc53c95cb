"""Selection of the pages with the largest scores, for all query heads of a group together, without waiting for the host."""

import torch
import triton
import triton.language as tl

from kvdb.attention.triton.gather import logarithm
from kvdb.attention.triton.tile import LOG2_E

CHUNK = 512
"""Scores that a program looks at together."""
BITS = 4
"""Bits of the k-th score that one pass over the scores finds."""


@triton.jit
def _swap(bits):
    """Bits of a float as an integer that sorts the same way; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth_kernel(scores, out, k, pages, BITS: tl.constexpr, CHUNK: tl.constexpr):
    """The k-th largest score of a row, digit by digit of its order from the largest down."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * pages
    digit = tl.arange(0, 1 << BITS)
    prefix = tl.zeros([1], tl.int32)
    for step in tl.static_range(0, 32 // BITS):
        place = 32 - BITS * (step + 1)
        at_least = (prefix | (digit << place)) ^ -0x80000000
        counts = tl.zeros([1 << BITS], tl.int32)
        for first in range(0, pages, CHUNK):
            page = first + tl.arange(0, CHUNK)
            score = tl.load(scores + page, mask=page < pages, other=0.0)
            order = tl.where(page < pages, _swap(score.to(tl.int32, bitcast=True)), -0x80000000)
            counts += tl.sum((order[:, None] >= at_least[None, :]).to(tl.int32), 0)
        # Counts fall with the digit, and the lowest leaves k: the largest that does is the k-th score's.
        prefix |= tl.maximum(tl.sum((counts >= k).to(tl.int32), 0) - 1, 0) << place
    score = _swap(prefix ^ -0x80000000).to(tl.float32, bitcast=True)
    tl.store(out + row + tl.zeros([1], tl.int32), score)


@triton.jit
def _select_kernel(
    scores, threshold, ids, counts, sums, pages, capacity, factor,
    GROUP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    row = tl.arange(0, ROWS)
    mine = row < GROUP
    page = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    at = scores + (group * GROUP + row[:, None]).to(tl.int64) * pages + page[None, :]
    score = tl.load(at, mask=mine[:, None] & (page < pages)[None, :], other=float("-inf"))
    least = tl.load(threshold + group * GROUP + row, mask=mine, other=float("inf"))
    reached = (score >= least[:, None]) & (score > float("-inf"))
    selected = tl.max(reached.to(tl.int32), 0)
    start = tl.atomic_add(counts + group, tl.sum(selected, 0))
    to = start + tl.cumsum(selected, 0) - 1
    tl.store(ids + group.to(tl.int64) * capacity + to, page, mask=(selected > 0) & (to < capacity))
    if SUMS:
        # What is left out reaches no threshold, so that relative to it nothing is large.
        base = tl.where(mine & (least > float("-inf")) & (least < float("inf")), least, 0.0)
        rest = tl.where((selected > 0)[None, :], float("-inf"), score)
        tl.atomic_add(sums + group * GROUP + row, tl.sum(tl.exp2((rest - base[:, None]) * factor), 1), mask=mine)


@triton.jit
def _missed_kernel(threshold, counts, sums, missed, capacity, scale, tokens, rows, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Write the log of `tokens` times the sums, which are relative to the thresholds, to missed, and zero to sums."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    least = tl.load(threshold + row, mask=inside, other=0.0)
    whole = tl.load(counts + row // GROUP, mask=inside, other=0) > capacity
    total = tl.load(sums + row, mask=inside, other=0.0) * tokens
    # What float32 is too small for, a share of 2^-100 covers.
    total = tl.where(least > float("-inf"), total + 7.9e-31, total)
    base = tl.where((least > float("-inf")) & (least < float("inf")), least, 0.0)
    tl.store(missed + row, tl.where(whole, float("-inf"), logarithm(total) + base * scale), mask=inside)
    tl.store(sums + row, tl.zeros([ROWS], tl.float32), mask=inside)


def kth_largest(scores: torch.Tensor, k: int, out: torch.Tensor) -> None:
    """Write to out, float32 `[sequences, q_heads]`, the k-th largest of scores float32 `[sequences, q_heads, pages]`; minus
    infinity where there are fewer than k. Raises ValueError where shapes or dtypes are wrong."""
    _check_scores(scores, 1)
    _check_rows("out", out, scores)
    if k < 1:
        raise ValueError(f"k is {k}; expected 1 or more")
    rows, pages = scores.shape[0] * scores.shape[1], scores.shape[2]
    if k > pages:
        out.fill_(-torch.inf)
    elif rows:
        chunk = min(CHUNK, max(16, triton.next_power_of_2(pages)))
        _kth_kernel[(rows,)](scores, out, k, pages, BITS=BITS, CHUNK=chunk, num_warps=8)


def select_pages(
    ids: torch.Tensor,
    counts: torch.Tensor,
    scores: torch.Tensor,
    threshold: torch.Tensor,
    group: int,
    sums: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Select the pages whose score reaches the threshold of some head of a group and is not minus infinity.

    scores: float32 `[sequences, q_heads, pages]`; threshold: float32 `[sequences, q_heads]`. Writes ids int32 `[sequences,
    kv_heads, capacity]` in no order, and counts int32 `[sequences, kv_heads]`; a count beyond the capacity means that everything
    is to be read. sums: float32 `[sequences, q_heads]`, to which exp(scale * (score - threshold)) is added for each page that is
    not selected. Raises ValueError where shapes or dtypes are wrong.
    """
    _check_scores(scores, group)
    _check_rows("threshold", threshold, scores)
    sequences, q_heads, pages = scores.shape
    counts.zero_()
    if sequences and pages:
        chunk = min(CHUNK, max(16, triton.next_power_of_2(pages)))
        _select_kernel[(triton.cdiv(pages, chunk), sequences * q_heads // group)](
            scores, threshold, ids, counts, threshold if sums is None else sums, pages, ids.shape[2], scale * LOG2_E.value,
            GROUP=group, ROWS=triton.next_power_of_2(group), CHUNK=chunk, SUMS=sums is not None,
        )  # fmt: skip


def log_missed_mass(
    threshold: torch.Tensor,
    counts: torch.Tensor,
    capacity: int,
    sums: torch.Tensor,
    scale: float,
    tokens: int,
    missed: torch.Tensor,
) -> None:
    """Write to missed, float32 `[sequences, q_heads]`, the log of the sum of exp(scale * score) over the pages that
    `select_pages` left out, each counted `tokens` times; minus infinity where everything is read. Sets sums to zero again."""
    rows, group = sums.numel(), sums.shape[1] // counts.shape[1]
    _missed_kernel[(triton.cdiv(rows, 256),)](
        threshold, counts, sums, missed, capacity, scale, tokens, rows, GROUP=group, ROWS=256
    )


def _check_scores(scores: torch.Tensor, group: int) -> None:
    if scores.dtype != torch.float32 or scores.ndim != 3 or not scores.is_contiguous() or group < 1 or scores.shape[1] % group:
        said = f"scores are {scores.dtype} {tuple(scores.shape)}"
        raise ValueError(f"{said}; expected contiguous float32 (sequences, a multiple of {group} heads, pages)")


def _check_rows(name: str, x: torch.Tensor, scores: torch.Tensor) -> None:
    if x.dtype != torch.float32 or x.shape != scores.shape[:2] or not x.is_contiguous() or x.device != scores.device:
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; expected contiguous float32 {tuple(scores.shape[:2])}")
