"""DIPR on the device (AlayaDB, arXiv 2504.10326, definition 2): every token whose q.k is within beta of the largest, found by
codes and attended by its key. Nothing goes to the host between the launches: both passes over the codes share one maximum."""

from typing import Any

import torch
import triton
import triton.language as tl

from kvdb.attention.triton.flat import estimate, half_of, queries, reach_of
from kvdb.attention.triton.gather import gather, logarithm
from kvdb.attention.triton.pages import INTERPRETED, Pages, Runs
from kvdb.attention.triton.tile import LOG2_E, padded
from kvdb.attention.triton.workspace import DiprWorkspace, Selection, tile_of, tiles_of_block

CHUNK = 16
"""Tiles whose records one program of the second pass reads."""
BASES = 64
"""Blocks whose centres one program of the first launch multiplies with the queries."""
ROWS = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3) else 16
"""The fewest query rows of a scan. Triton before 3.3 multiplies no fewer than 16."""
SCANS = 16 if INTERPRETED else 6336
"""The most programs of a scan: four times the twelve that fit on each of 132 multiprocessors, so that the last ones to end are a
small part. The interpreter runs one after the other."""
WARPS = 1
"""Warps of a program of a scan. One alone needs no shared memory to sum over a tile."""


@triton.jit
def _begin_kernel(
    q, halves, table, begin, tokens, floor, best, bases, sums, counts, blocks_max, rows_all,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    ROWS: tl.constexpr, BYTES: tl.constexpr, CENTRES_AT: tl.constexpr, MATH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write q.centre of every block, and start values to what the passes change. q is taken in two parts, as MATH may not hold
    it."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    group = sequence * KV_HEADS + head
    row = tl.arange(0, ROWS)
    mine = row < GROUP
    if tl.program_id(0) == 0:
        own = group * GROUP + row
        tl.store(best + own, tl.load(floor + own, mask=mine), mask=mine)
        tl.store(sums + own, tl.zeros([ROWS], tl.float32), mask=mine)
        tl.store(sums + rows_all + own, tl.zeros([ROWS], tl.float32), mask=mine)
        tl.store(counts + group, 0)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    dim = tl.arange(0, DIMS)
    inside = block * BLOCK_SIZE < tl.load(tokens + sequence)
    slot = tl.load(table + tl.load(begin + sequence) + block, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    at = halves + (slot * (BYTES // 2) + CENTRES_AT + head * HEAD_DIM)[:, None] + dim[None, :]
    centre = tl.load(at, mask=mask, other=0.0).to(MATH)
    mask = mine[:, None] & (dim < HEAD_DIM)[None, :]
    x = tl.load(q + (group * GROUP + row)[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    first = x.to(MATH)
    base = tl.dot(centre, tl.trans(first), input_precision="ieee")
    base = tl.dot(centre, tl.trans((x - first.to(tl.float32)).to(MATH)), base, input_precision="ieee")
    to = bases + (group * blocks_max + block).to(tl.int64)[:, None] * GROUP + row[None, :]
    tl.store(to, base, mask=inside[:, None] & mine[None, :])


@triton.jit
def _tiles(tokens, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """How many tiles hold so many tokens."""
    return tokens // BLOCK_SIZE * TILES + (tokens % BLOCK_SIZE + TILE - 1) // TILE


@triton.jit
def _scan_kernel(
    q, slab, halves, table, begin, tokens, best, bases, records, scale, tiles_max, tiles_each,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, BYTES: tl.constexpr, CODES_AT: tl.constexpr, FACTORS_AT: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, EXTRA: tl.constexpr, MATH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    group = sequence * KV_HEADS + head
    length_all = tl.load(tokens + sequence)
    first = tl.program_id(0) * tiles_each
    last = tl.minimum(first + tiles_each, _tiles(length_all, BLOCK_SIZE, TILE, TILES))
    if first >= last:
        return
    table += tl.load(begin + sequence)
    low_math, high_math, middle, length, unit = queries(q, group, GROUP, HEAD_DIM, HALF, ROWS, MATH)
    row = tl.arange(0, ROWS)
    lowest = tl.full([TILE, ROWS], float("-inf"), tl.float32)
    record = records + group.to(tl.int64) * tiles_max * (3 * GROUP) + row
    base_at = bases + group.to(tl.int64) * (tiles_max // TILES * GROUP) + row
    factor = (scale * LOG2_E) * unit
    inverse = 1 / unit
    for tile in tl.range(first, last, num_stages=STAGES):
        block = tile // TILES
        place = tile % TILES * TILE + tl.arange(0, TILE)
        inside = (place < BLOCK_SIZE) & (block * BLOCK_SIZE + place < length_all)
        slot = tl.load(table + block).to(tl.int64)
        base = tl.load(base_at + block * GROUP, mask=row < GROUP, other=0.0) * inverse
        near, left = estimate(
            slab, halves, slot, head, place, base, low_math, high_math, middle,
            KV_HEADS, BLOCK_SIZE, HEAD_DIM, HALF, BYTES, CODES_AT, FACTORS_AT, TILE, EXTRA, MATH,
        )  # fmt: skip
        near += tl.where(inside, 0.0, float("-inf"))[:, None]
        wrong = length[None, :] * left[:, None]
        lowest = tl.maximum(lowest, near - wrong)
        top = tl.max(near + wrong, 0)
        weight = tl.exp2(near * factor[None, :] - (top * factor)[None, :])
        mass = logarithm(tl.sum(weight, 0)) + top * unit * scale
        at = record + tile * (3 * GROUP)
        tl.store(at, top * unit, mask=row < GROUP)
        tl.store(at + GROUP, mass, mask=row < GROUP)
        tl.store(at + 2 * GROUP, mass + tl.max(left, 0) * length * unit * scale, mask=row < GROUP)
    tl.atomic_max(best + group * GROUP + row, tl.max(lowest, 0) * unit, mask=row < GROUP)


@triton.jit
# size: a pass over records, the tiles that it opens, and the end of both
def _pick_kernel(
    q, slab, halves, table, begin, tokens, best, bases, records, sums, done, ids, counts, missed, missed_bound, scale, beta,
    tiles_max, capacity, rows_all,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, BYTES: tl.constexpr, CODES_AT: tl.constexpr, FACTORS_AT: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, EXTRA: tl.constexpr, MATH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    group = sequence * KV_HEADS + head
    length_all = tl.load(tokens + sequence)
    tiles = _tiles(length_all, BLOCK_SIZE, TILE, TILES)
    programs = tl.maximum((tiles + CHUNK - 1) // CHUNK, 1)
    if tl.program_id(0) >= programs:
        return
    row = tl.arange(0, ROWS)
    mine = row < GROUP
    own = group * GROUP + row
    threshold = tl.load(best + own, mask=mine, other=float("inf")) - beta
    factor = scale * LOG2_E
    number = tl.arange(0, CHUNK)
    tile = tl.program_id(0) * CHUNK + number
    at = records + (group.to(tl.int64) * tiles_max + tile[:, None]) * (3 * GROUP) + row[None, :]
    mask = (tile < tiles)[:, None] & mine[None, :]
    opened = tl.max(((tl.load(at, mask=mask, other=float("-inf")) >= threshold[None, :]) & mask).to(tl.int32), 1)
    bits = tl.sum(opened << number, 0)
    # A mass is kept relative to its row's threshold, which nothing that is left out exceeds.
    mask &= opened[:, None] == 0
    shift = tl.where(mine & (threshold > float("-inf")), threshold * factor, 0.0)
    mass = tl.load(at + GROUP, mask=mask, other=float("-inf"))
    bound = tl.load(at + 2 * GROUP, mask=mask, other=float("-inf"))
    mass_sum = tl.sum(tl.exp2(mass * LOG2_E - shift[None, :]), 0)
    bound_sum = tl.sum(tl.exp2(bound * LOG2_E - shift[None, :]), 0)
    if bits != 0:
        low_math, high_math, middle, length, unit = queries(q, group, GROUP, HEAD_DIM, HALF, ROWS, MATH)
        table += tl.load(begin + sequence)
        base_at = bases + group.to(tl.int64) * (tiles_max // TILES * GROUP) + row
        for i in range(CHUNK):
            if (bits >> i) & 1:
                this = tl.program_id(0) * CHUNK + i
                block = this // TILES
                place = this % TILES * TILE + tl.arange(0, TILE)
                token = block * BLOCK_SIZE + place
                inside = (place < BLOCK_SIZE) & (token < length_all)
                base = tl.load(base_at + block * GROUP, mask=mine, other=0.0) / unit
                near, left = estimate(
                    slab, halves, tl.load(table + block).to(tl.int64), head, place, base, low_math, high_math, middle,
                    KV_HEADS, BLOCK_SIZE, HEAD_DIM, HALF, BYTES, CODES_AT, FACTORS_AT, TILE, EXTRA, MATH,
                )  # fmt: skip
                near *= unit[None, :]
                upper = near + (length * unit)[None, :] * left[:, None]
                selected = tl.max(((upper >= threshold[None, :]) & mine[None, :]).to(tl.int32), 1)
                selected = tl.where(inside, selected, 0)
                start = tl.atomic_add(counts + group, tl.sum(selected, 0))
                to = start + tl.cumsum(selected, 0) - 1
                tl.store(ids + group.to(tl.int64) * capacity + to, token, mask=(selected > 0) & (to < capacity))
                rest = (inside & (selected == 0))[:, None]
                mass_sum += tl.sum(tl.exp2(tl.where(rest, near, float("-inf")) * factor - shift[None, :]), 0)
                bound_sum += tl.sum(tl.exp2(tl.where(rest, upper, float("-inf")) * factor - shift[None, :]), 0)
    tl.atomic_add(sums + own, mass_sum, mask=mine)
    tl.atomic_add(sums + rows_all + own, bound_sum, mask=mine)
    tl.debug_barrier()
    if tl.atomic_add(done + group, 1) == programs - 1:
        tl.store(done + group, 0)
        whole = tl.load(counts + group, volatile=True) > capacity
        total = tl.load(sums + own, mask=mine, other=0.0, volatile=True)
        # What float32 is too small for, a share of 2^-100 covers.
        total_bound = tl.load(sums + rows_all + own, mask=mine, other=0.0, volatile=True)
        total_bound += tl.where(length_all > 0, 7.9e-31, 0.0)
        tl.store(missed + own, tl.where(whole, float("-inf"), logarithm(total) + shift / LOG2_E), mask=mine)
        tl.store(missed_bound + own, tl.where(whole, float("-inf"), logarithm(total_bound) + shift / LOG2_E), mask=mine)


def scan(
    q: torch.Tensor, pages: Pages, runs: Runs, scale: float, beta: float, floor: torch.Tensor, workspace: DiprWorkspace
) -> Selection:
    """Select all tokens that may be within beta of the largest q.k of some query head of their group, by the codes of
    `flat.encode`. None that is within beta is missed; others may be selected too.

    q: `[sequences, q_heads, head_dim]`, contiguous. scale > 0. floor: float32 `[sequences, q_heads]`, the largest q.k seen
    elsewhere, minus infinity for none. Every token of the runs must have been encoded, and none of its block overwritten since.
    Returns what the workspace holds, until its next use. Where a count exceeds the capacity, nothing counts as missed. Raises
    ValueError where shapes, dtypes or the workspace do not fit.
    """
    _check(q, pages, runs, scale, beta, floor, workspace)
    layout, selection = pages.layout, workspace.selection
    sequences, q_heads, _ = q.shape
    if sequences == 0:
        return selection
    group = q_heads // layout.kv_heads
    tile, tiles_of = tile_of(layout), tiles_of_block(layout)
    tiles = max(1, -(-runs.tokens_max // layout.block_size) * tiles_of)
    tiles_max = workspace.records.shape[2]
    heads, rows = sequences * layout.kv_heads, sequences * q_heads
    shape: dict[str, Any] = {
        "GROUP": group,
        "KV_HEADS": layout.kv_heads,
        "BLOCK_SIZE": layout.block_size,
        "HEAD_DIM": layout.head_dim,
        "BYTES": layout.nbytes,
    }
    read = (q, pages.slab, pages.halves, runs.table, runs.begin, runs.tokens, workspace.best, workspace.bases, workspace.records)
    _begin_kernel[(triton.cdiv(tiles // tiles_of, BASES), layout.kv_heads, sequences)](
        q, *read[2:6], floor, *read[6:8], workspace.sums, selection.counts, tiles_max // tiles_of, rows, **shape,
        DIMS=padded(layout.head_dim), ROWS=max(16, triton.next_power_of_2(group)), CENTRES_AT=layout.centres_at // 2,
        MATH=tl.float32 if INTERPRETED else tl.bfloat16, BLOCKS=BASES, num_warps=4,
    )  # fmt: skip
    shape |= {
        "HALF": half_of(layout), "ROWS": max(ROWS, triton.next_power_of_2(group)), "CODES_AT": layout.codes_at,
        "FACTORS_AT": layout.factors_at // 2, "TILE": tile, "TILES": tiles_of, "MATH": tl.float32 if INTERPRETED else tl.float16,
        "EXTRA": reach_of(layout) / 2048 if q.dtype == torch.float32 else 0.0, "num_warps": WARPS,
    }  # fmt: skip
    each = max(4, triton.cdiv(tiles * heads, SCANS))
    _scan_kernel[(triton.cdiv(tiles, each), layout.kv_heads, sequences)](*read, scale, tiles_max, each, **shape, STAGES=5)
    _pick_kernel[(triton.cdiv(tiles, CHUNK), layout.kv_heads, sequences)](
        *read, workspace.sums, workspace.done, selection.ids, selection.counts, selection.missed, selection.missed_bound, scale,
        beta, tiles_max, selection.ids.shape[2], rows, **shape, CHUNK=CHUNK,
    )  # fmt: skip
    return selection


def dipr(
    q: torch.Tensor,
    pages: Pages,
    runs: Runs,
    scale: float,
    beta: float,
    floor: torch.Tensor,
    workspace: DiprWorkspace,
    out: torch.Tensor,
    lse: torch.Tensor,
    top: torch.Tensor | None = None,
) -> Selection:
    """Attention over what `scan` finds: out as q, lse (and top, the largest q.k) float32 `[sequences, q_heads]`; and what was
    selection. Four launches, none of which the host waits for. Raises ValueError as `scan` and `gather` do."""
    selection = scan(q, pages, runs, scale, beta, floor, workspace)
    gather(workspace.partials, q, pages, runs, (selection.ids, selection.counts), 1, scale, out, lse, top)
    return selection


def _check(
    q: torch.Tensor, pages: Pages, runs: Runs, scale: float, beta: float, floor: torch.Tensor, workspace: DiprWorkspace
) -> None:
    sequences, heads, dim = runs.sequences, pages.layout.kv_heads, pages.layout.head_dim
    if q.ndim != 3 or q.shape[0] != sequences or q.shape[1] % heads or q.shape[2] != dim or not q.is_contiguous():
        raise ValueError(f"q is {tuple(q.shape)}; expected contiguous ({sequences}, a multiple of {heads}, {dim})")
    if floor.dtype != torch.float32 or floor.shape != q.shape[:2] or not floor.is_contiguous():
        raise ValueError(f"floor is {floor.dtype} {tuple(floor.shape)}; expected contiguous float32 {tuple(q.shape[:2])}")
    if not (scale > 0 and beta >= 0):
        raise ValueError(f"scale is {scale} and beta {beta}; expected more than 0, and 0 or more")
    made = workspace.best.shape
    if made != floor.shape or workspace.tokens_max < runs.tokens_max or len({x.device for x in (q, floor, pages.slab)}) > 1:
        raise ValueError(
            f"the workspace is for {tuple(made)} heads of {workspace.tokens_max} tokens on {workspace.best.device}; "
            f"the query has {tuple(floor.shape)} of {runs.tokens_max} on {q.device}"
        )
