"""Attention of one query a head over paged keys and values, of many sequences at once."""

import torch
import triton
import triton.language as tl

from kvdb.attention.triton.batch import PROGRAM_INTS, TILE_ROWS, Batch
from kvdb.attention.triton.pages import Pages
from kvdb.attention.triton.tile import (
    LOG2_E,
    attend,
    constants,
    load_queries,
    merge_partials,
    padded,
    store_partial,
    store_state,
    stored,
    tile_tokens,
)
from kvdb.storage.slot import SLOT_FORMATS


def decode(
    q: torch.Tensor,
    pages: Pages,
    batch: Batch,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    top: torch.Tensor | None = None,
) -> None:
    """Attention of each sequence of the batch over all its tokens.

    q, out: `[sequences, q_heads, head_dim]`, contiguous, of any float dtype, on the device of the pages. lse: float32
    `[sequences, q_heads]`, the natural logarithm of the sum of exp(scale * q.k); top: of the same form, the largest q.k. They are
    -inf, and out is 0, where a sequence has no tokens. scale: above 0.

    Flash-Decoding (arXiv 2311.01282): a program answers a range of a piece's tokens for one KV head, with the query heads of its
    group, of all sequences that read the piece, as the rows of one tile, so that what is shared is read once (Hydragen, arXiv
    2402.05099). Whichever program brings the last partial state of a sequence merges them. Nothing is allocated, and nothing
    waits for the host: it may be captured in a CUDA graph. Calls with one batch, or with batches of one workspace, must follow
    one another on a stream. Raises ValueError on arguments that do not fit one another.
    """
    _check(q, pages, batch, scale, out, lse, top)
    for launch in batch.launches:
        narrow = launch.rows == TILE_ROWS[0]
        merged = triton.next_power_of_2(batch.group) if narrow else 16
        # Narrow rows and narrow elements leave more registers to the merge, which then waits less often.
        held = 64 if narrow and SLOT_FORMATS[pages.layout.format] <= 2 else 32
        _decode_kernel[(launch.programs * pages.layout.kv_heads,)](
            q,
            stored(pages),
            pages.floats,
            out,
            lse,
            lse if top is None else top,
            batch.table,
            batch.lengths,
            batch.pieces,
            batch.hidden,
            batch.cos,
            batch.sin,
            batch.programs[launch.start :],
            batch.members,
            batch.states,
            batch.counters,
            batch.partial,
            batch.tops,
            batch.totals,
            scale * LOG2_E.value,
            **shape(pages, batch, launch.rows, merged, held),
            TOP=top is not None,
            PROGRAM=PROGRAM_INTS,
            **constants(pages),
        )


def shape(pages: Pages, batch: Batch, rows: int, merged: int = 16, held: int = 32) -> dict[str, int | bool]:
    """Constants of a launch with tiles of so many query rows, and how many warps and stages they take. merged: rows that are
    merged at a time; held: values that a thread holds meanwhile."""
    columns, element = padded(pages.layout.head_dim), SLOT_FORMATS[pages.layout.format]
    warps = 8 if rows == 128 else 4
    return {
        "GROUP": batch.group,
        "PAIRS": batch.pairs,
        "INTERLEAVED": batch.interleaved,
        "HIDDEN": batch.any_hidden,
        "ROWS": rows,
        "TOKENS": tile_tokens(pages),
        "DIMS": columns,
        "MERGED": merged,
        "STATES": max(1, held * 32 * warps // (merged * columns)),
        "LANES": 32 * warps,
        "num_warps": warps,
        "num_stages": 4 if element == 1 else 3,
    }


def _check(
    q: torch.Tensor, pages: Pages, batch: Batch, scale: float, out: torch.Tensor, lse: torch.Tensor, top: torch.Tensor | None
) -> None:
    layout = pages.layout
    if layout != batch.layout:
        raise ValueError(f"the batch was made for {batch.layout}, the pages are {layout}")
    if not scale > 0:
        raise ValueError(f"the scale is {scale}; expected more than 0")
    rows = (batch.sequences, layout.kv_heads * batch.group)
    named = {"q": (q, (*rows, layout.head_dim)), "out": (out, (*rows, layout.head_dim)), "lse": (lse, rows)}
    if top is not None:
        named["top"] = (top, rows)
    for name, (tensor, expected) in named.items():
        if tuple(tensor.shape) != expected or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tuple(tensor.shape)}, strides {tensor.stride()}; expected {expected}, contiguous")
        if tensor.device != pages.slab.device:
            raise ValueError(f"{name} is on {tensor.device}, the pages on {pages.slab.device}")
        if not tensor.is_floating_point() or (name in {"lse", "top"} and tensor.dtype != torch.float32):
            raise ValueError(f"{name} is {tensor.dtype}")
    if batch.table.device != pages.slab.device:
        raise ValueError(f"the batch is on {batch.table.device}, the pages on {pages.slab.device}")


@triton.jit  # size: a kernel, whose parts are already in tile.py
def _decode_kernel(
    q,
    slab,
    floats,
    out,
    lse,
    largest,
    table,
    lengths,
    pieces,
    hidden,
    cos,
    sin,
    programs,
    members,
    states,
    counters,
    partial,
    tops,
    totals,
    scale2,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIMS: tl.constexpr,
    MERGED: tl.constexpr,
    STATES: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    FLOAT8: tl.constexpr,
    MATH: tl.constexpr,
):
    head = tl.program_id(0) % KV_HEADS
    program = programs + tl.program_id(0) // KV_HEADS * PROGRAM
    piece = tl.load(program)
    split = tl.load(program + 1)
    splits = tl.load(program + 2)
    first_member = tl.load(program + 3)
    member_count = tl.load(program + 4)

    # Tokens [begin, end) of the piece. Its length is known on the device alone; a split may be empty.
    tokens = tl.load(lengths + piece)
    each = tl.cdiv(tl.cdiv(tokens, splits), TOKENS) * TOKENS
    begin = split * each
    end = tl.minimum(begin + each, tokens)
    slots = table + tl.load(pieces + piece * 4)
    words = tl.load(pieces + piece * 4 + 2)

    rows = tl.arange(0, ROWS)
    valid = rows < member_count * GROUP
    member = members + 2 * (first_member + rows // GROUP)
    sequence = tl.load(member, mask=valid, other=0)
    query = (sequence * KV_HEADS + head) * GROUP + rows % GROUP
    rotation = tl.load(pieces + piece * 4 + 1)
    x = load_queries(q, query, valid, cos, sin, rotation, PAIRS, INTERLEAVED, HEAD_DIM, DIMS).to(MATH)

    acc = tl.zeros([ROWS, DIMS], tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, best, total = attend(
        x, slab, floats, slots, begin, end, head, hidden, words, rows, acc, best, total, scale2, HIDDEN, False, TOKENS, DIMS,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, STRIDE, VALUES_AT, SCALES_AT, SCALES_STRIDE, FLOAT8, MATH,
    )  # fmt: skip

    state = tl.load(member + 1, mask=valid, other=0) + split
    row = (state * KV_HEADS + head) * GROUP + rows % GROUP
    store_partial(partial, tops, totals, row, valid, acc, best, total, HEAD_DIM, DIMS)

    # Everything above is written before a thread says so: the barrier orders the threads, acq_rel the processors. One lane a
    # thread, so that no two threads share what the addition returns.
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    mine = lane < member_count
    who = tl.load(members + 2 * (first_member + lane), mask=mine, other=0)
    count = tl.load(states + 2 * who + 1, mask=mine, other=0)
    counter = counters + who * KV_HEADS + head
    before = tl.atomic_add(counter, 1, mask=mine, sem="acq_rel")
    last = (mine & (before == count - 1)).to(tl.int32)
    if tl.max(last, 0) > 0:
        # For the next launch.
        tl.store(counter, 0, mask=last > 0)
        for row_begin in tl.range(0, member_count * GROUP, MERGED, num_stages=1):
            r = row_begin + tl.arange(0, MERGED)
            own = r // GROUP
            done = tl.max(tl.where(own[:, None] == lane[None, :], last[None, :], 0), 1) > 0
            if tl.max(done.to(tl.int32), 0) > 0:
                done_by = tl.load(members + 2 * (first_member + own), mask=done, other=0)
                first = tl.load(states + 2 * done_by, mask=done, other=0)
                parts = tl.load(states + 2 * done_by + 1, mask=done, other=0)
                base = (first * KV_HEADS + head) * GROUP + r % GROUP
                whole, high, weight = merge_partials(
                    partial, tops, totals, base, parts, KV_HEADS * GROUP, scale2, HEAD_DIM, DIMS, MERGED, STATES
                )
                target = (done_by * KV_HEADS + head) * GROUP + r % GROUP
                store_state(out, lse, target, done, whole, high, weight, scale2, HEAD_DIM, DIMS)
                if TOP:
                    tl.store(largest + target, high, mask=done)
