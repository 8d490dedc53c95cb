"""Attention of many new tokens of one sequence over its paged keys and values, their own among them."""

import torch
import triton
import triton.language as tl

from kvdb.attention.triton.batch import NARROW_PROGRAMS, SPLIT_TOKENS_MIN, TILE_ROWS, Batch, multiprocessors
from kvdb.attention.triton.decode import shape
from kvdb.attention.triton.pages import Pages
from kvdb.attention.triton.tile import (
    LOG2_E,
    attend,
    constants,
    load_queries,
    merge_partials,
    store_partial,
    store_state,
    stored,
)


def prefill(
    q: torch.Tensor, pages: Pages, batch: Batch, scale: float, out: torch.Tensor, lse: torch.Tensor, splits: int | None = None
) -> None:
    """Attention of the last n tokens of the one sequence of the batch: to all of its pieces but for the last, of which each token
    sees what stands before it and itself.

    q, out: `[q_heads, n, head_dim]`, contiguous, of any float dtype, on the device of the pages; n: at most the tokens of the
    last piece, where theirs are already stored. lse: float32 `[q_heads, n]`, natural; -inf, and out 0, where a token sees
    nothing. scale: above 0. splits: into how many ranges the context is cut, whose states the program that ends last merges; None
    for as many as keep the device busy.

    FlashAttention-2 (arXiv 2307.08691); tokens and the query heads of a group are the rows of a tile. Nothing waits for the host.
    Where the context is split, room for partial states is allocated, on the current stream. Raises ValueError on arguments that
    do not fit one another.
    """
    _check(q, pages, batch, scale, out, lse)
    n, layout = int(q.shape[1]), pages.layout
    if n == 0:
        return
    rows = next((size for size in TILE_ROWS if n * batch.group <= size), TILE_ROWS[-1])
    tiles = triton.cdiv(n * batch.group, rows)
    splits = splits or _splits(tiles * layout.kv_heads, rows, batch)
    partial_rows = tiles * layout.kv_heads * splits * rows if splits > 1 else 1
    partial = torch.empty(partial_rows * layout.head_dim, dtype=torch.float32, device=q.device)
    tops, totals = torch.empty((2, partial_rows), dtype=torch.float32, device=q.device)
    counters = torch.zeros(tiles * layout.kv_heads if splits > 1 else 1, dtype=torch.int32, device=q.device)
    tile = shape(pages, batch, rows)
    del tile["LANES"]
    _prefill_kernel[(tiles * layout.kv_heads * splits,)](
        q,
        stored(pages),
        pages.floats,
        out,
        lse,
        batch.table,
        batch.lengths,
        batch.pieces,
        batch.hidden,
        batch.cos,
        batch.sin,
        counters,
        partial,
        tops,
        totals,
        n,
        int(batch.pieces.shape[0]),
        splits,
        scale * LOG2_E.value,
        SPLIT=splits > 1,
        **tile,
        **constants(pages),
    )


def _splits(programs: int, rows: int, batch: Batch) -> int:
    """Splits that give each multiprocessor as many programs as it has room for, if there are tokens enough."""
    room = multiprocessors(batch.device) * (NARROW_PROGRAMS if rows == TILE_ROWS[0] else 1)
    return max(1, min(room // programs, -(-batch.tokens_max // SPLIT_TOKENS_MIN)))


def _check(q: torch.Tensor, pages: Pages, batch: Batch, scale: float, out: torch.Tensor, lse: torch.Tensor) -> None:
    layout = pages.layout
    if batch.sequences != 1:
        raise ValueError(f"the batch has {batch.sequences} sequences; prefill answers one")
    if layout != batch.layout:
        raise ValueError(f"the batch was made for {batch.layout}, the pages are {layout}")
    if not scale > 0:
        raise ValueError(f"the scale is {scale}; expected more than 0")
    heads = layout.kv_heads * batch.group
    if q.dim() != 3 or (q.shape[0], q.shape[2]) != (heads, layout.head_dim):
        raise ValueError(f"q is {tuple(q.shape)}; expected ({heads}, n, {layout.head_dim})")
    for name, tensor, expected in (("q", q, q.shape), ("out", out, q.shape), ("lse", lse, q.shape[:2])):
        if tensor.shape != expected or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}, strides {tensor.stride()}; expected {tuple(expected)}, contiguous"
            )
        if tensor.device != pages.slab.device or tensor.device != batch.table.device:
            raise ValueError(f"{name} is on {tensor.device}, the pages on {pages.slab.device}, the batch on {batch.table.device}")
        if not tensor.is_floating_point() or (name == "lse" and tensor.dtype != torch.float32):
            raise ValueError(f"{name} is {tensor.dtype}")


# What changes from call to call is not compiled for.
@triton.jit(do_not_specialize=["n", "piece_count", "splits"])  # size: a kernel, whose parts are already in tile.py
def _prefill_kernel(
    q,
    slab,
    floats,
    out,
    lse,
    table,
    lengths,
    pieces,
    hidden,
    cos,
    sin,
    counters,
    partial,
    tops,
    totals,
    n,
    piece_count,
    splits,
    scale2,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIMS: tl.constexpr,
    MERGED: tl.constexpr,
    STATES: tl.constexpr,
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
    split = tl.program_id(0) // KV_HEADS % splits
    # The last tile sees most, and begins first.
    tile = tl.num_programs(0) // (KV_HEADS * splits) - 1 - tl.program_id(0) // (KV_HEADS * splits)
    rows = tile * ROWS + tl.arange(0, ROWS)
    valid = rows < n * GROUP
    token = rows // GROUP
    query = (head * GROUP + rows % GROUP) * n + token

    # Whole tiles of all pieces, one behind the other, are cut into splits.
    whole = 0
    for piece in tl.range(0, piece_count, num_stages=1):
        whole += tl.cdiv(tl.load(lengths + piece), TOKENS)
    each = tl.cdiv(whole, splits) * TOKENS
    ahead = 0

    acc = tl.zeros([ROWS, DIMS], tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for piece in tl.range(0, piece_count, num_stages=1):
        tokens = tl.load(lengths + piece)
        begin = tl.maximum(0, split * each - ahead)
        end = tl.minimum(tokens, split * each + each - ahead)
        ahead += tl.cdiv(tokens, TOKENS) * TOKENS
        # The last piece comes first, and ends in the n tokens themselves.
        sees = tl.where(piece == 0, tokens - n, tokens)
        end = tl.minimum(end, sees + tl.where(piece == 0, tl.minimum(n, (tile * ROWS + ROWS - 1) // GROUP + 1), 0))
        sees += tl.where(piece == 0, token, 0)

        slots = table + tl.load(pieces + piece * 4)
        rotation = tl.load(pieces + piece * 4 + 1)
        words = tl.load(pieces + piece * 4 + 2)
        x = load_queries(q, query, valid, cos, sin, rotation, PAIRS, INTERLEAVED, HEAD_DIM, DIMS).to(MATH)
        acc, best, total = attend(
            x, slab, floats, slots, begin, end, head, hidden, words, sees, acc, best, total, scale2, HIDDEN, True, TOKENS, DIMS,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, STRIDE, VALUES_AT, SCALES_AT, SCALES_STRIDE, FLOAT8, MATH,
        )  # fmt: skip

    if SPLIT:
        base = ((tile * KV_HEADS + head) * splits) * ROWS
        row = base + split * ROWS + tl.arange(0, ROWS)
        store_partial(partial, tops, totals, row, valid, acc, best, total, HEAD_DIM, DIMS)
        # As in decode: the barrier orders the threads, acq_rel the processors.
        tl.debug_barrier()
        before = tl.atomic_add(counters + tile * KV_HEADS + head, 1, sem="acq_rel")
        tl.debug_barrier()
        if before == splits - 1:
            for row_begin in tl.range(0, ROWS, MERGED, num_stages=1):
                r = row_begin + tl.arange(0, MERGED)
                own = tile * ROWS + r
                done = own < n * GROUP
                merged, high, weight = merge_partials(
                    partial, tops, totals, base + r, tl.where(done, splits, 0), ROWS, scale2, HEAD_DIM, DIMS, MERGED, STATES
                )
                target = (head * GROUP + own % GROUP) * n + own // GROUP
                store_state(out, lse, target, done, merged, high, weight, scale2, HEAD_DIM, DIMS)
    else:
        store_state(out, lse, query, valid, acc, best, total, scale2, HEAD_DIM, DIMS)
