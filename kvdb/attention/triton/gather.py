"""Attention over selected pages or tokens, read where they lie."""

import torch
import triton
import triton.language as tl

from kvdb.attention.triton.pages import Pages, Runs
from kvdb.attention.triton.tile import LN_2, LOG2_E, stored, widen
from kvdb.attention.triton.workspace import Partials


@triton.jit
def logarithm(x):
    """The natural logarithm of x >= 0."""
    return tl.where(x > 0, tl.log2(tl.where(x > 0, x, 1.0)) * LN_2, float("-inf"))


@triton.jit
def _merge(out, lse, top, part_out, part_lse, part_top, group, parts, SPLITS: tl.constexpr, GROUP: tl.constexpr,
           HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, CHUNK: tl.constexpr, TOP: tl.constexpr):  # fmt: skip
    """Merge the states of a group's parts (FlashAttention's rescaling, arXiv 2205.14135)."""
    dim = tl.arange(0, DIMS)
    for row in range(GROUP):
        at = group * GROUP + row
        all_parts = tl.arange(0, SPLITS)
        logs = tl.load(part_lse + at * SPLITS + all_parts, mask=all_parts < parts, other=float("-inf"), volatile=True)
        largest = tl.max(logs, 0)
        some = largest > float("-inf")
        total = tl.sum(tl.exp2((logs - tl.where(some, largest, 0.0)) * LOG2_E), 0)
        whole = logarithm(total) + tl.where(some, largest, 0.0)
        sums = tl.zeros([DIMS], tl.float32)
        for first in range(0, parts, CHUNK):
            part = first + tl.arange(0, CHUNK)
            inside = part < parts
            log = tl.load(part_lse + at * SPLITS + part, mask=inside, other=float("-inf"), volatile=True)
            share = tl.exp2((log - tl.where(some, whole, 0.0)) * LOG2_E)
            mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
            x = tl.load(part_out + (at * SPLITS + part[:, None]).to(tl.int64) * HEAD_DIM + dim[None, :], mask=mask, other=0.0,
                        cache_modifier=".cg")  # fmt: skip
            sums += tl.sum(x * share[:, None], 0)
        tl.store(out + at * HEAD_DIM + dim, sums.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
        tl.store(lse + at, whole)
        if TOP:
            tops = tl.load(part_top + at * SPLITS + all_parts, mask=all_parts < parts, other=float("-inf"), volatile=True)
            tl.store(top + at, tl.max(tops, 0))


@triton.jit
# size: one pass over the tokens and the merge of its parts
def _gather_kernel(
    q, elements, floats, table, begin, tokens, ids, counts, part_out, part_lse, part_top, done, out, lse, top, scale, capacity,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    ROWS: tl.constexpr, STRIDE: tl.constexpr, VALUES_AT: tl.constexpr, SCALES_AT: tl.constexpr, SCALES_STRIDE: tl.constexpr,
    QUANTISED: tl.constexpr, FLOAT8: tl.constexpr,
    UNIT: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, TOP: tl.constexpr, MATH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    group = sequence * KV_HEADS + head
    length = tl.load(tokens + sequence)
    count = tl.load(counts + group)
    whole = count > capacity
    items = tl.where(whole, length, count * UNIT)
    listed = tl.where(whole, 0, items)
    each = tl.maximum((items + SPLITS * TOKENS - 1) // (SPLITS * TOKENS), 1) * TOKENS
    parts = tl.maximum((items + each - 1) // each, 1)
    if split >= parts:
        return
    table += tl.load(begin + sequence)
    ids += group.to(tl.int64) * capacity
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    mine = row < GROUP
    queries = tl.load(
        q + (group * GROUP + row)[:, None] * HEAD_DIM + dim[None, :], mask=mine[:, None] & (dim < HEAD_DIM)[None, :], other=0.0
    )
    queries = queries.to(MATH)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    for first in tl.range(split * each, tl.minimum(split * each + each, items), TOKENS, num_stages=STAGES):
        item = first + tl.arange(0, TOKENS)
        page = tl.load(ids + item // UNIT, mask=(item < items) & (item < listed), other=0)
        # The last page of a block may be cut, and so may the last block.
        within = page % UNITS * UNIT + item % UNIT
        token = tl.where(whole, item, page // UNITS * BLOCK_SIZE + within)
        inside = (item < items) & (token < length) & (tl.where(whole, 0, within) < BLOCK_SIZE)
        slot = tl.load(table + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        place = head * BLOCK_SIZE + token % BLOCK_SIZE
        at = elements + (slot * STRIDE + place * HEAD_DIM)[:, None] + dim[None, :]
        mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
        k = widen(tl.load(at, mask=mask, other=0), FLOAT8, MATH)
        v = widen(tl.load(at + VALUES_AT, mask=mask, other=0), FLOAT8, MATH)
        score = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if QUANTISED:
            scales = floats + slot * SCALES_STRIDE + SCALES_AT + place
            score *= tl.load(scales, mask=inside, other=0.0)[None, :]
        score = tl.where(inside[None, :], score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(larger > float("-inf"), larger, 0.0)
        weight = tl.exp2((score - base[:, None]) * (scale * LOG2_E))
        keep = tl.exp2((largest - base) * (scale * LOG2_E))
        total = total * keep + tl.sum(weight, 1)
        if QUANTISED:
            weight *= tl.load(scales + KV_HEADS * BLOCK_SIZE, mask=inside, other=0.0)[None, :]
        sums = tl.dot(weight.to(MATH), v, sums * keep[:, None], input_precision="ieee")
        largest = larger
    some = total > 0
    at = (group * GROUP + row) * SPLITS + split
    tl.store(part_out + at.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :], sums / tl.where(some, total, 1.0)[:, None],
             mask=mine[:, None] & (dim < HEAD_DIM)[None, :])  # fmt: skip
    tl.store(part_lse + at, logarithm(total) + tl.where(some, largest, 0.0) * scale, mask=mine)
    tl.store(part_top + at, largest, mask=mine)
    tl.debug_barrier()
    if tl.atomic_add(done + group, 1) == parts - 1:
        tl.store(done + group, 0)
        _merge(out, lse, top, part_out, part_lse, part_top, group, parts, SPLITS, GROUP, HEAD_DIM, DIMS, min(SPLITS, 16), TOP)


def gather(
    partials: Partials,
    q: torch.Tensor,
    pages: Pages,
    runs: Runs,
    selected: tuple[torch.Tensor, torch.Tensor],
    unit: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    top: torch.Tensor | None = None,
) -> None:
    """Attention over what is selected of each sequence and KV head; over all its tokens where a count exceeds the capacity.

    partials: where the states of its parts go. q, out: `[sequences, q_heads, head_dim]`, contiguous. selected: ids int32
    `[sequences, kv_heads, capacity]` and counts int32 `[sequences, kv_heads]`. unit: tokens of a page; pages of a run are
    numbered block by block, the last of a block may be cut. 1: ids are tokens. lse, top: float32 `[sequences, q_heads]`; top
    takes the largest q.k. Nothing selected gives out 0 and lse minus infinity. Raises ValueError where shapes or dtypes are
    wrong.
    """
    layout, (ids, counts) = pages.layout, selected
    sequences, q_heads, dim = q.shape
    _check(q, pages, runs, selected, unit, out, lse, top)
    if sequences == 0:
        return
    element = pages.elements.element_size()
    group = q_heads // layout.kv_heads
    _gather_kernel[(partials.splits, layout.kv_heads, sequences)](
        q, stored(pages), pages.floats, runs.table, runs.begin, runs.tokens, ids, counts, partials.out, partials.lse,
        partials.top, partials.done, out, lse, lse if top is None else top, scale, ids.shape[2],
        GROUP=group, KV_HEADS=layout.kv_heads, BLOCK_SIZE=layout.block_size, HEAD_DIM=dim, DIMS=max(16,
        triton.next_power_of_2(dim)), ROWS=max(16, triton.next_power_of_2(group)), STRIDE=layout.nbytes // element,
        VALUES_AT=layout.values_at // element, SCALES_AT=layout.scales_at // 4, SCALES_STRIDE=layout.nbytes // 4,
        QUANTISED=layout.quantised, FLOAT8=layout.format == "float8", UNIT=unit,
        UNITS=-(-layout.block_size // unit), SPLITS=partials.splits, TOKENS=32, TOP=top is not None, MATH=pages.math, STAGES=3,
        num_warps=4,
    )  # fmt: skip


def _check(
    q: torch.Tensor,
    pages: Pages,
    runs: Runs,
    selected: tuple[torch.Tensor, torch.Tensor],
    unit: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    top: torch.Tensor | None,
) -> None:
    sequences, heads, dim = runs.sequences, pages.layout.kv_heads, pages.layout.head_dim
    for name, x in (("q", q), ("out", out)):
        if x.ndim != 3 or x.shape != q.shape or x.shape[::2] != (sequences, dim) or x.shape[1] % heads or not x.is_contiguous():
            raise ValueError(f"{name} is {tuple(x.shape)}; expected contiguous ({sequences}, a multiple of {heads}, {dim})")
    for name, state in (("lse", lse), ("top", top)):
        if state is not None and (state.dtype != torch.float32 or state.shape != q.shape[:2] or not state.is_contiguous()):
            raise ValueError(f"{name} is {state.dtype} {tuple(state.shape)}; expected contiguous float32 {tuple(q.shape[:2])}")
    ids, counts = selected
    if ids.dtype != torch.int32 or ids.ndim != 3 or ids.shape[:2] != (sequences, heads) or not ids.is_contiguous():
        raise ValueError(f"ids are {ids.dtype} {tuple(ids.shape)}; expected contiguous int32 ({sequences}, {heads}, capacity)")
    if counts.dtype != torch.int32 or counts.shape != (sequences, heads) or not counts.is_contiguous():
        raise ValueError(f"counts are {counts.dtype} {tuple(counts.shape)}; expected contiguous int32 ({sequences}, {heads})")
    if unit < 1:
        raise ValueError(f"unit is {unit}; expected 1 token or more")
