"""Four-bit codes for the keys of a slot. They give an estimate of q.k and a bound of its error.

The bound is that of the CPU's flat index: Cauchy-Schwarz, over the length of what a code leaves of its key. Keys are not rotated
first: relative to the centre of 64 neighbours no dimension stands out.
"""

import math

import torch
import triton
import triton.language as tl

from kvdb.attention.triton.pages import Pages, check_numbers
from kvdb.attention.triton.tile import load_rows, stored, up
from kvdb.storage.slot import SlotLayout


@triton.jit
def _keys(
    slab, floats, slot, head, token, inside, dim, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    STRIDE: tl.constexpr, SCALES_AT: tl.constexpr, SCALES_STRIDE: tl.constexpr, QUANTISED: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Both halves of the dimensions of some keys, float32 `[tokens, HALF]`, zero where there is none."""
    row = head * BLOCK_SIZE + token
    at = slab + slot * STRIDE + row * HEAD_DIM
    scales = floats + slot * SCALES_STRIDE + SCALES_AT + row
    real = dim < HEAD_DIM // 2
    low = load_rows(at, scales, inside, dim, real, QUANTISED, FLOAT8)
    return low, load_rows(at, scales, inside, dim + HEAD_DIM // 2, real, QUANTISED, FLOAT8)


@triton.jit
def _encode_kernel(
    slab, elements, floats, halves, slots, counts,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, STRIDE: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALES_STRIDE: tl.constexpr, QUANTISED: tl.constexpr, FLOAT8: tl.constexpr, BYTES: tl.constexpr,
    CODES_AT: tl.constexpr,
    FACTORS_AT: tl.constexpr, CENTRES_AT: tl.constexpr, REACH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    count = tl.load(counts + tl.program_id(0))
    head = tl.program_id(1)
    dim = tl.arange(0, HALF)
    real = dim < HEAD_DIM // 2
    low_sum = tl.zeros([HALF], tl.float32)
    high_sum = tl.zeros([HALF], tl.float32)
    for first in range(0, count, TOKENS):
        token = first + tl.arange(0, TOKENS)
        low, high = _keys(elements, floats, slot, head, token, token < count, dim, BLOCK_SIZE, HEAD_DIM, STRIDE, SCALES_AT,
                          SCALES_STRIDE, QUANTISED, FLOAT8)  # fmt: skip
        low_sum += tl.sum(low, 0)
        high_sum += tl.sum(high, 0)
    many = tl.maximum(count, 1).to(tl.float32)
    low_centre = (low_sum / many).to(tl.bfloat16)
    high_centre = (high_sum / many).to(tl.bfloat16)
    at = halves + slot * (BYTES // 2) + CENTRES_AT + head * HEAD_DIM + dim
    tl.store(at, low_centre, mask=real)
    tl.store(at + HEAD_DIM // 2, high_centre, mask=real)
    low_centre = low_centre.to(tl.float32)
    high_centre = high_centre.to(tl.float32)
    length = tl.sqrt(tl.sum(low_centre * low_centre, 0) + tl.sum(high_centre * high_centre, 0))
    for first in range(0, BLOCK_SIZE, TOKENS):
        token = first + tl.arange(0, TOKENS)
        inside = token < count
        low, high = _keys(elements, floats, slot, head, token, token < count, dim, BLOCK_SIZE, HEAD_DIM, STRIDE, SCALES_AT,
                          SCALES_STRIDE, QUANTISED, FLOAT8)  # fmt: skip
        low = tl.where(real[None, :], low - low_centre[None, :], 0.0)
        high = tl.where(real[None, :], high - high_centre[None, :], 0.0)
        step = up(tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1)) * (1 / 7.5))
        inverse = tl.where(step > 1e-30, 1 / tl.where(step > 1e-30, step, 1.0), 0.0)
        low_code = tl.minimum(tl.maximum(tl.floor(low * inverse[:, None]) + 8, 0), 15)
        high_code = tl.minimum(tl.maximum(tl.floor(high * inverse[:, None]) + 8, 0), 15)
        low -= tl.where(real[None, :], (low_code - 7.5) * step[:, None], 0.0)
        high -= tl.where(real[None, :], (high_code - 7.5) * step[:, None], 0.0)
        # What rounding in float32 adds when q.k is estimated, of q's length, is added to what the code leaves.
        left = tl.sqrt(tl.sum(low * low, 1) + tl.sum(high * high, 1)) * 1.001 + (length + REACH * step) * (1 / 65536)
        packed = low_code.to(tl.int32) | (high_code.to(tl.int32) << 4)
        to = slab + slot * BYTES + CODES_AT + (head * BLOCK_SIZE + token)[:, None] * (HEAD_DIM // 2) + dim[None, :]
        tl.store(to, packed.to(tl.uint8), mask=inside[:, None] & real[None, :])
        to = halves + slot * (BYTES // 2) + FACTORS_AT + head * BLOCK_SIZE + token
        tl.store(to, tl.where(inside, step, 0.0).to(tl.bfloat16), mask=token < BLOCK_SIZE)
        tl.store(to + KV_HEADS * BLOCK_SIZE, tl.where(inside, up(left), 0.0).to(tl.bfloat16), mask=token < BLOCK_SIZE)


@triton.jit
def queries(q, group, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, MATH: tl.constexpr):
    """The query rows of a group, each over a power of two: both halves of their dimensions in MATH, `[HALF, ROWS]`, the lower one
    16 times as large; 7.5 times the sum of each; their lengths; and those powers."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HALF)
    mask = (row < GROUP)[:, None] & (dim < HEAD_DIM // 2)[None, :]
    at = q + (group * GROUP + row)[:, None] * HEAD_DIM + dim[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    unit = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = tl.where(unit > 1e-30, unit, 1.0)
    low = low / unit[:, None]
    high = high / unit[:, None]
    length = tl.sqrt(tl.sum(low * low, 1) + tl.sum(high * high, 1)) * 1.0001
    low_math = (low * 16).to(MATH)
    high_math = high.to(MATH)
    middle = 7.5 * (tl.sum(low_math.to(tl.float32), 1) / 16 + tl.sum(high_math.to(tl.float32), 1))
    return tl.trans(low_math), tl.trans(high_math), middle, length, unit


@triton.jit
def _nibbles(codes, MATH: tl.constexpr):
    """The lower halves of bytes, and 16 times the upper ones; over 2^24 where MATH is float16. There four bytes are taken at a
    time, and the bits of a half are, as they stand, a float16 below its normal numbers, which tensor cores multiply exactly."""
    if tl.float32 == MATH:
        low = (codes & 0x0F).to(tl.float32)
        high = (codes & 0xF0).to(tl.float32)
    else:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 first, second;
            prmt.b32 first, $4, 0, 0x4140;
            prmt.b32 second, $4, 0, 0x4342;
            and.b32 $0, first, 0x000F000F;
            and.b32 $1, second, 0x000F000F;
            and.b32 $2, first, 0x00F000F0;
            and.b32 $3, second, 0x00F000F0;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def estimate(
    slab, halves, slot, head, place, base, low_math, high_math, middle,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BYTES: tl.constexpr,
    CODES_AT: tl.constexpr, FACTORS_AT: tl.constexpr, TILE: tl.constexpr, EXTRA: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Estimates of q.k by code, `[TILE, ROWS]`, and, of a query's length, how wrong they are at most, `[TILE]`.

    base: q.centre `[ROWS]`. Where a block holds no token, the estimate is the base, and not wrong. EXTRA: what MATH takes from a
    query, of a code's step.
    """
    dim = tl.arange(0, HALF)
    at = slab + slot * BYTES + CODES_AT + (head * BLOCK_SIZE + place)[:, None] * (HEAD_DIM // 2) + dim[None, :]
    factor = halves + slot * (BYTES // 2) + FACTORS_AT + head * BLOCK_SIZE + place
    if BLOCK_SIZE % TILE == 0 and HALF == HEAD_DIM // 2:
        codes = tl.load(at)
        step = tl.load(factor).to(tl.float32)
        left = tl.load(factor + KV_HEADS * BLOCK_SIZE).to(tl.float32)
    else:
        codes = tl.load(at, mask=(place < BLOCK_SIZE)[:, None] & (dim < HEAD_DIM // 2)[None, :], other=0)
        step = tl.load(factor, mask=place < BLOCK_SIZE, other=0.0).to(tl.float32)
        left = tl.load(factor + KV_HEADS * BLOCK_SIZE, mask=place < BLOCK_SIZE, other=0.0).to(tl.float32)
    left += EXTRA * step
    low, high = _nibbles(codes, MATH)
    near = tl.dot(low, low_math, input_precision="ieee")
    near = tl.dot(high, high_math, near, input_precision="ieee")
    # What a product of code and query, as `_nibbles` and `queries` give them, is worth.
    WORTH: tl.constexpr = 0.0625 if tl.float32 == MATH else 1048576.0
    near = base[None, :] + (step * WORTH)[:, None] * (near - (middle / WORTH)[None, :])
    return near, left


def encode(pages: Pages, slots: torch.Tensor, counts: torch.Tensor) -> None:
    """Write the codes, factors and centres of slots from the keys in them. |q.k - estimate| <= |q| * left always holds.

    slots: int32 `[n]`, counts: int32 `[n]`, tokens of each, on the device. Keys are taken as `blocks.load` gives them. Raises
    ValueError where shapes or dtypes are wrong, or head_dim is no multiple of 8.
    """
    layout = pages.layout
    check_numbers(pages, slots=slots, counts=counts)
    if layout.head_dim % 8:
        raise ValueError(f"head_dim is {layout.head_dim}; expected a multiple of 8")
    if len(slots):
        element = pages.elements.element_size()
        _encode_kernel[(len(slots), layout.kv_heads)](
            pages.slab, stored(pages), pages.floats, pages.halves, slots, counts,
            KV_HEADS=layout.kv_heads, BLOCK_SIZE=layout.block_size, HEAD_DIM=layout.head_dim, HALF=half_of(layout),
            STRIDE=layout.nbytes // element, SCALES_AT=layout.scales_at // 4, SCALES_STRIDE=layout.nbytes // 4,
            QUANTISED=layout.quantised, FLOAT8=layout.format == "float8", BYTES=layout.nbytes, CODES_AT=layout.codes_at,
            FACTORS_AT=layout.factors_at // 2,
            CENTRES_AT=layout.centres_at // 2, REACH=reach_of(layout), TOKENS=min(32, triton.next_power_of_2(layout.block_size)),
        )  # fmt: skip


def half_of(layout: SlotLayout) -> int:
    """Half of the dimensions, padded as kernels need it."""
    return int(max(16, triton.next_power_of_2(layout.head_dim // 2)))


def reach_of(layout: SlotLayout) -> float:
    """The largest distance of a coded key from its centre, in steps of its code."""
    return 7.5 * math.sqrt(layout.head_dim)
