"""Keys and values are stored to slots, loaded from them, and copied between them; quantised where the format is."""

import torch
import triton
import triton.language as tl

from kvdb.attention.triton.pages import INTERPRETED, Pages, check_numbers
from kvdb.attention.triton.tile import load_rows, stored

LARGEST = {"float8": 448.0, "int8": 127.0}
"""The value of the largest element of a quantised row. float8 is e4m3, whose largest finite number is 448."""
CUTS = {"bfloat16": 16, "float8": 20}
"""Bits that float32 has and the format has not, for rounding by hand: to float8 because cards before sm_89 cannot, to bfloat16
because the interpreter does not."""
PROGRAM_TOKENS = 128 if INTERPRETED else 16
"""The most tokens that one program stores or loads. The interpreter is fastest with few programs."""
COPY_WORDS = 4096
"""int32 that one program copies."""


@triton.jit
def _store_kernel(
    k, v, slab, scales, slots, start_at, start, n, k_head, k_token, v_head, v_token,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, STRIDE: tl.constexpr,
    VALUES_AT: tl.constexpr, SCALES_AT: tl.constexpr, SCALES_STRIDE: tl.constexpr, LARGEST: tl.constexpr, ROUNDS: tl.constexpr,
    CUTS: tl.constexpr, ON_DEVICE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    is_v = tl.program_id(2)
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    dim = tl.arange(0, DIMS)
    inside = row < n
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    first = start
    if ON_DEVICE:
        first = tl.load(start_at)
    token = first + row
    slot = tl.load(slots + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    if is_v:
        x = tl.load(v + head * v_head + row[:, None] * v_token + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        x = tl.load(k + head * k_head + row[:, None] * k_token + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    place = head * BLOCK_SIZE + token % BLOCK_SIZE
    if LARGEST > 0:
        largest = tl.max(tl.abs(x), 1)
        some = largest > 1e-30
        x = x * tl.where(some, LARGEST / tl.where(some, largest, 1.0), 0.0)[:, None]
        if ROUNDS:
            x = tl.floor(x + 0.5)
        scale = tl.where(some, largest / LARGEST, 0.0)
        tl.store(scales + slot * SCALES_STRIDE + SCALES_AT + is_v * (KV_HEADS * BLOCK_SIZE) + place, scale, mask=inside)
    if CUTS > 0:  # rounded to a float of fewer bits, to even
        small = tl.floor(x * 512 + 0.5) * (1 / 512)  # what float8 has below its normal numbers
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + ((1 << (CUTS - 1)) - 1) + ((bits >> CUTS) & 1)) & -(1 << CUTS)
        normal = bits.to(tl.float32, bitcast=True)
        x = tl.where((CUTS == 20) & (tl.abs(x) < 0.015625), small, normal)
    at = slab + slot[:, None] * STRIDE + is_v * VALUES_AT + place[:, None] * HEAD_DIM + dim[None, :]
    if CUTS == 20:
        half = (x * (1 / 256)).to(tl.float16).to(tl.int16, bitcast=True)  # as `tile.widen`, the other way round
        tl.store(at, (((half >> 7) & 0x7F) | ((half >> 8) & 0x80)).to(tl.uint8), mask=mask)
    else:
        tl.store(at, x.to(slab.dtype.element_ty), mask=mask)


@triton.jit
def _load_kernel(
    k, v, slab, scales, slots, start, n,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, STRIDE: tl.constexpr,
    VALUES_AT: tl.constexpr, SCALES_AT: tl.constexpr, SCALES_STRIDE: tl.constexpr, QUANTISED: tl.constexpr, FLOAT8: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    is_v = tl.program_id(2)
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    dim = tl.arange(0, DIMS)
    inside = row < n
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    token = start + row
    slot = tl.load(slots + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    place = head * BLOCK_SIZE + token % BLOCK_SIZE
    at = slab + slot * STRIDE + is_v * VALUES_AT + place * HEAD_DIM
    scale_at = scales + slot * SCALES_STRIDE + SCALES_AT + is_v * (KV_HEADS * BLOCK_SIZE) + place
    x = load_rows(at, scale_at, inside, dim, dim < HEAD_DIM, QUANTISED, FLOAT8)
    to = (head.to(tl.int64) * n + row[:, None]) * HEAD_DIM + dim[None, :]
    if is_v:
        tl.store(v + to, x, mask=mask)
    else:
        tl.store(k + to, x, mask=mask)


@triton.jit
def _copy_kernel(words, sources, targets, STRIDE: tl.constexpr, WORDS: tl.constexpr):
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = at < STRIDE
    tl.store(words + target * STRIDE + at, tl.load(words + source * STRIDE + at, mask=inside), mask=inside)


def store(pages: Pages, slots: torch.Tensor, start: int | torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write tokens [start, start + n) of a run of slots: converted to the slots' format, or quantised with one scale for each
    key and each value, its largest element over LARGEST.

    slots: int32 `[blocks]`, on the device. start: tokens of the run before these, or int32 `[1]` on the device, so that a CUDA
    graph can replay it. k, v: `[kv_heads, n, head_dim]` of any float dtype, rows contiguous. Index pages are not brought up to
    date: `flat.encode` and `coarse.bounds` do that. Raises ValueError where a shape, a dtype or the number of slots is wrong.
    """
    layout = pages.layout
    n = int(k.shape[1]) if k.ndim == 3 else -1
    for name, x in (("k", k), ("v", v)):
        if tuple(x.shape) != (layout.kv_heads, n, layout.head_dim) or not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; expected floats ({layout.kv_heads}, n, {layout.head_dim})")
        if x.stride(2) != 1:
            raise ValueError(f"rows of {name} have stride {x.stride(2)}; expected contiguous rows")
    on_device = isinstance(start, torch.Tensor)
    first = 0 if isinstance(start, torch.Tensor) else start
    _check_run(pages, slots, first, n)
    if n == 0:
        return
    tokens = min(PROGRAM_TOKENS, triton.next_power_of_2(n))
    _store_kernel[(triton.cdiv(n, tokens), layout.kv_heads, 2)](
        k, v, stored(pages), pages.floats, slots, start if on_device else slots, first, n,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        **_shape(pages), LARGEST=LARGEST.get(layout.format, 0.0), ROUNDS=layout.format == "int8",
        CUTS=CUTS.get(layout.format, 0) if INTERPRETED or layout.format == "float8" else 0, ON_DEVICE=on_device, TOKENS=tokens,
    )  # fmt: skip


def load(pages: Pages, slots: torch.Tensor, start: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of tokens [start, start + n) of a run of slots: float32 `[kv_heads, n, head_dim]`, dequantised.

    slots: int32 `[blocks]`, on the device. Raises ValueError where the run has fewer tokens.
    """
    layout = pages.layout
    _check_run(pages, slots, start, n)
    shape = (layout.kv_heads, n, layout.head_dim)
    k, v = (torch.empty(shape, dtype=torch.float32, device=pages.slab.device) for _ in "kv")
    if n:
        tokens = min(PROGRAM_TOKENS, triton.next_power_of_2(n))
        _load_kernel[(triton.cdiv(n, tokens), layout.kv_heads, 2)](
            k,
            v,
            stored(pages),
            pages.floats,
            slots,
            start,
            n,
            **_shape(pages),
            QUANTISED=layout.quantised,
            FLOAT8=layout.format == "float8",
            TOKENS=tokens,
        )
    return k, v


def copy(pages: Pages, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole slots with their index pages, sources[i] to targets[i]. int32 `[n]` both, on the device; no target is
    a source or another target. Raises ValueError where they differ in length."""
    check_numbers(pages, sources=sources)
    check_numbers(pages, targets=targets)
    if len(sources) != len(targets):
        raise ValueError(f"there are {len(sources)} sources and {len(targets)} targets; expected as many")
    if len(sources):
        words = pages.layout.nbytes // 4
        _copy_kernel[(len(sources), triton.cdiv(words, COPY_WORDS))](
            pages.slab.view(torch.int32), sources, targets, STRIDE=words, WORDS=COPY_WORDS
        )


def _shape(pages: Pages) -> dict[str, int]:
    layout = pages.layout
    return {
        "KV_HEADS": layout.kv_heads,
        "BLOCK_SIZE": layout.block_size,
        "HEAD_DIM": layout.head_dim,
        "DIMS": triton.next_power_of_2(layout.head_dim),
        "STRIDE": pages.elements.shape[1],
        "VALUES_AT": layout.values_at // pages.elements.element_size(),
        "SCALES_AT": layout.scales_at // 4,
        "SCALES_STRIDE": layout.nbytes // 4,
    }


def _check_run(pages: Pages, slots: torch.Tensor, start: int, n: int) -> None:
    check_numbers(pages, slots=slots)
    holds = len(slots) * pages.layout.block_size
    if start < 0 or n < 0 or start + n > holds:
        raise ValueError(f"tokens [{start}, {start + n}) of {len(slots)} slots; they hold [0, {holds})")
