"""Parts that attention kernels share: loading a tile of stored tokens, the online softmax over it, and merging partial states.

Scores are q.k as it is; the softmax takes them times `scale2`, which is the scale times log2(e), above 0. A partial state is the
largest score `top`, the `total` of 2^(scale2 * (score - top)), and the values weighted with the same, not yet divided by it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kvdb.attention.triton.pages import Pages
from kvdb.storage.slot import SLOT_FORMATS

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def stored(pages: Pages) -> torch.Tensor:
    """The slab as kernels read it. float8 is read as bytes, because cards before sm_89 cannot convert it."""
    return pages.slab if pages.layout.format == "float8" else pages.elements


def padded(head_dim: int) -> int:
    """Columns of a tile for head_dim: a power of two, at least 16, as tensor cores need."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile_tokens(pages: Pages) -> int:
    """Tokens of a tile, at most 128. Its keys and values take 32 KiB at most."""
    element = max(2, SLOT_FORMATS[pages.layout.format])
    return max(16, min(128, (16 << 10) // (padded(pages.layout.head_dim) * element)))


def constants(pages: Pages) -> dict[str, Any]:
    """The constants of a kernel that follow from the layout of these pages."""
    layout, element = pages.layout, SLOT_FORMATS[pages.layout.format]
    return {
        "KV_HEADS": layout.kv_heads,
        "HEAD_DIM": layout.head_dim,
        "BLOCK_SIZE": layout.block_size,
        "STRIDE": layout.nbytes // element,
        "VALUES_AT": layout.values_at // element,
        "SCALES_AT": layout.scales_at // 4 if layout.quantised else -1,
        "SCALES_STRIDE": layout.nbytes // 4,
        "FLOAT8": layout.format == "float8",
        "MATH": pages.math,
    }


@triton.jit
def widen(x, FLOAT8: tl.constexpr, MATH: tl.constexpr):
    """Stored elements as tensor cores take them, without their scale. float8 comes as bytes; e4m3's bits, shifted to where half
    precision has its exponent and fraction, are the number divided by 2^8."""
    if FLOAT8:
        bits = x.to(tl.int16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half.to(tl.float32) * 256.0).to(MATH)
    else:  # noqa: RET505  # Triton compiles one branch, and wants both
        return x.to(MATH)


@triton.jit
def load_rows(rows, scales, inside, columns, real, QUANTISED: tl.constexpr, FLOAT8: tl.constexpr):
    """Stored keys or values, dequantised: float32 `[rows, columns]`, 0 where there are none.

    rows, scales: pointers to where each row and its scale lie. inside: which rows are there; real: which columns are.
    """
    x = widen(tl.load(rows[:, None] + columns[None, :], mask=inside[:, None] & real[None, :], other=0), FLOAT8, tl.float32)
    if QUANTISED:
        x = x * tl.load(scales, mask=inside, other=0.0)[:, None]
    return x


@triton.jit
def up(x):
    """Round float32 up to what bfloat16 can hold: cutting bits off brings a number nearer to zero."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(x > 0, bits + 0xFFFF, bits) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def load_queries(
    q, rows, valid, cos, sin, rotation, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr
):
    """float32 `[rows, DIMS]` of these rows of q `[..., HEAD_DIM]`, turned back by row `rotation` of the angles, which may be -1.

    PAIRS: dimensions that turn, halved; 0 where none ever does.
    """
    d = tl.arange(0, DIMS)
    there = valid[:, None] & (d < HEAD_DIM)[None, :]
    at = q + rows.to(tl.int64)[:, None] * HEAD_DIM
    x = tl.load(at + d[None, :], mask=there, other=0.0).to(tl.float32)
    if PAIRS > 0:
        turned = d < tl.where(rotation >= 0, 2 * PAIRS, 0)
        if INTERLEAVED:
            first = d % 2 == 0
            pair = d // 2
            other = tl.where(first, d + 1, d - 1)
        else:
            first = d < PAIRS
            pair = tl.where(first, d, d - PAIRS)
            other = tl.where(first, d + PAIRS, d - PAIRS)
        y = tl.load(at + other[None, :], mask=there & turned[None, :], other=0.0).to(tl.float32)
        c = tl.load(cos + rotation * PAIRS + pair, mask=turned, other=1.0)
        s = tl.load(sin + rotation * PAIRS + pair, mask=turned, other=0.0)
        x = x * c[None, :] + y * tl.where(first, s, -s)[None, :]
    return x


@triton.jit
def load_slots(table, begin, end, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """The slots of tokens begin, begin + 1, ...: one slot where a block holds whole tiles, else `[TOKENS]`. begin: a multiple of
    TOKENS.

    Loops load them one tile ahead: the pipeliner counts copies that wait for other copies in order, and would keep only one tile
    on its way if it had to fetch the slots as well.
    """
    if BLOCK_SIZE % TOKENS == 0:
        return tl.load(table + begin // BLOCK_SIZE, mask=begin < end, other=0)
    else:  # noqa: RET505  # Triton compiles one branch, and wants both
        t = begin + tl.arange(0, TOKENS)
        return tl.load(table + t // BLOCK_SIZE, mask=t < end, other=0)


@triton.jit
def load_tile(
    slab,
    floats,
    slot,
    begin,
    there,
    head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Keys and values `[TOKENS, DIMS]` as stored, and their scales `[TOKENS]`, of tokens begin, begin + 1, ... of one KV head, in
    the slots that `load_slots` gave for them."""
    n = tl.arange(0, TOKENS)
    d = tl.arange(0, DIMS)
    inside = there[:, None] & (d < HEAD_DIM)[None, :]
    if BLOCK_SIZE % TOKENS == 0:
        row = head * BLOCK_SIZE + begin % BLOCK_SIZE
        at = slab + slot.to(tl.int64) * STRIDE + row * HEAD_DIM + (n[:, None] * HEAD_DIM + d[None, :])
        scales = floats + slot.to(tl.int64) * SCALES_STRIDE + SCALES_AT + row + n
    else:
        row = head * BLOCK_SIZE + (begin + n) % BLOCK_SIZE
        at = slab + (slot.to(tl.int64) * STRIDE + row * HEAD_DIM)[:, None] + d[None, :]
        scales = floats + slot.to(tl.int64) * SCALES_STRIDE + SCALES_AT + row
    k = tl.load(at, mask=inside, other=0)
    v = tl.load(at + VALUES_AT, mask=inside, other=0)
    k_scale = tl.full([TOKENS], 1.0, tl.float32)
    v_scale = k_scale
    if SCALES_AT >= 0:
        k_scale = tl.load(scales, mask=there, other=0.0)
        v_scale = tl.load(scales + KV_HEADS * BLOCK_SIZE, mask=there, other=0.0)
    return k, v, k_scale, v_scale


@triton.jit
def shown(hidden, begin, t, there, BLOCK_SIZE: tl.constexpr):
    """Which of tokens t are there and not hidden. hidden: int64 words, the first of them 0. begin: the first word of the piece,
    -1 where nothing is hidden."""
    WORDS: tl.constexpr = (BLOCK_SIZE + 63) // 64
    inside = t % BLOCK_SIZE
    at = tl.where(begin < 0, 0, begin + (t // BLOCK_SIZE) * WORDS + inside // 64)
    word = tl.load(hidden + at, mask=there, other=0)
    return there & (((word >> (inside % 64).to(tl.int64)) & 1) == 0)


@triton.jit
def absorb(
    acc, top, total, q, k, v, k_scale, v_scale, seen, scale2, FLOAT8: tl.constexpr, SCALED: tl.constexpr, MATH: tl.constexpr
):
    """The state after one more tile (FlashAttention-2's online softmax, arXiv 2307.08691). seen: fits `[rows, TOKENS]`."""
    score = tl.dot(q, tl.trans(widen(k, FLOAT8, MATH)), input_precision="ieee")
    if SCALED:
        score = score * k_scale[None, :]
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher) * scale2
    p = tl.exp2(score * scale2 - base[:, None])
    fade = tl.exp2(top * scale2 - base)
    total = total * fade + tl.sum(p, 1)
    if SCALED:
        p = p * v_scale[None, :]
    acc = tl.dot(p.to(MATH), widen(v, FLOAT8, MATH), acc * fade[:, None], input_precision="ieee")
    return acc, higher, total


@triton.jit
def attend(
    x, slab, floats, slots, begin, end, head, hidden, words, sees, acc, top, total, scale2, HIDDEN: tl.constexpr,
    CAUSAL: tl.constexpr, TOKENS: tl.constexpr, DIMS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STRIDE: tl.constexpr, VALUES_AT: tl.constexpr, SCALES_AT: tl.constexpr,
    SCALES_STRIDE: tl.constexpr, FLOAT8: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The state of query rows x after tokens [begin, end) of a piece more. sees: the last token that each row sees, if CAUSAL."""
    slot = load_slots(slots, begin, end, BLOCK_SIZE, TOKENS)
    for at in range(begin, end, TOKENS):
        ahead = load_slots(slots, at + TOKENS, end, BLOCK_SIZE, TOKENS)
        t = at + tl.arange(0, TOKENS)
        there = t < end
        seen = there
        if HIDDEN:
            seen = shown(hidden, words, t, there, BLOCK_SIZE)
        seen = seen[None, :]
        if CAUSAL:
            seen = seen & (t[None, :] <= sees[:, None])
        k, v, k_scale, v_scale = load_tile(
            slab, floats, slot, at, there, head,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, STRIDE, VALUES_AT, SCALES_AT, SCALES_STRIDE, TOKENS, DIMS,
        )  # fmt: skip
        acc, top, total = absorb(acc, top, total, x, k, v, k_scale, v_scale, seen, scale2, FLOAT8, SCALES_AT >= 0, MATH)
        slot = ahead
    return acc, top, total


@triton.jit
def store_partial(partial, tops, totals, row, valid, acc, top, total, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """Store partial states to these rows, past L1, for the program that merges them. A state of no tokens has no values."""
    tl.store(tops + row, top, mask=valid, cache_modifier=".cg")
    tl.store(totals + row, total, mask=valid, cache_modifier=".cg")
    d = tl.arange(0, DIMS)
    some = valid & (top > float("-inf"))
    at = partial + row.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
    tl.store(at, acc, mask=some[:, None] & (d < HEAD_DIM)[None, :], cache_modifier=".cg")


@triton.jit
def merge_partials(
    partial,
    tops,
    totals,
    first,
    count,
    step,
    scale2,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    MERGED: tl.constexpr,
    STATES: tl.constexpr,
):
    """The state of MERGED rows, of `count` partial states each at rows first, first + step, ... of `partial` `[..., HEAD_DIM]`.

    STATES of them are read at once. They were written by other programs of the launch, so L1 is passed by.
    """
    LOOKED: tl.constexpr = 64
    most = tl.max(count, 0)
    top = tl.full([MERGED], float("-inf"), tl.float32)
    for begin in tl.range(0, most, LOOKED, num_stages=1):
        s = begin + tl.arange(0, LOOKED)
        part = tl.load(
            tops + first[:, None] + s[None, :] * step,
            mask=s[None, :] < count[:, None],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        top = tl.maximum(top, tl.max(part, 1))
    base = tl.where(top == float("-inf"), 0.0, top) * scale2
    d = tl.arange(0, DIMS)
    acc = tl.zeros([MERGED, DIMS], tl.float32)
    total = tl.zeros([MERGED], tl.float32)
    for begin in tl.range(0, most, STATES, num_stages=1):
        s = begin + tl.arange(0, STATES)
        row = first[:, None] + s[None, :] * step
        part = tl.load(tops + row, mask=s[None, :] < count[:, None], other=float("-inf"), cache_modifier=".cg")
        # A partial state of nothing wrote no values.
        there = part > float("-inf")
        weight = tl.exp2(part * scale2 - base[:, None])
        total += tl.sum(weight * tl.load(totals + row, mask=there, other=0.0, cache_modifier=".cg"), 1)
        values = tl.load(
            partial + (row * HEAD_DIM)[:, :, None] + d[None, None, :],
            mask=there[:, :, None] & (d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += tl.sum(values * weight[:, :, None], 1)
    return acc, top, total


@triton.jit
def store_state(out, lse, rows, valid, acc, top, total, scale2, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """Store the output of a state, and the natural logarithm of its sum, to these rows of out `[..., HEAD_DIM]` and lse."""
    d = tl.arange(0, DIMS)
    some = total > 0
    whole = tl.where(some, total, 1.0)
    natural = (tl.where(some, top, 0.0) * scale2 + tl.log2(whole)) * LN_2
    tl.store(lse + rows, tl.where(some, natural, float("-inf")), mask=valid)
    at = out + rows.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
    tl.store(at, (acc / whole[:, None]).to(out.dtype.element_ty), mask=valid[:, None] & (d < HEAD_DIM)[None, :])
