"""Rotary position embedding of rows that lie on the device."""

import torch
import triton
import triton.language as tl

TILE_FLOATS = 4096
"""Elements that one program rotates."""


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, out: torch.Tensor) -> None:
    """Rotate rows by the angles of their tokens, in float32, rounded at the end (RoFormer, arXiv 2104.09864, equation 34).

    x, out: `[..., n, head_dim]`, contiguous, of any float dtype; they may be the same. cos, sin: float32 `[pairs]`, of all rows,
    or `[n, pairs]`, of each token; dimensions from 2 * pairs on stay as they are. interleaved: pairs are neighbours, otherwise
    dimension i is paired with i + pairs. Raises ValueError where shapes, dtypes or devices do not fit one another.
    """
    head_dim, pairs = int(x.shape[-1]), int(cos.shape[-1])
    if x.shape != out.shape or not (
        x.is_contiguous() and out.is_contiguous() and x.is_floating_point() and out.is_floating_point()
    ):
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}, out {out.dtype} {tuple(out.shape)}; expected two of a shape, contiguous"
        )
    n = 1 if cos.dim() == 1 else int(cos.shape[0])
    for name, angles in (("cos", cos), ("sin", sin)):
        fits = angles.shape in {(pairs,), (x.shape[-2] if x.dim() > 1 else 1, pairs)} and 2 * pairs <= head_dim
        if not fits or angles.shape != cos.shape or angles.dtype != torch.float32 or not angles.is_contiguous():
            raise ValueError(f"{name} is {angles.dtype} {tuple(angles.shape)} for rows {tuple(x.shape)}")
    if len({tensor.device for tensor in (x, cos, sin, out)}) > 1:
        raise ValueError(f"x, cos, sin and out are on {x.device}, {cos.device}, {sin.device} and {out.device}")
    rows = x.numel() // head_dim
    if rows == 0:
        return
    columns, rest = triton.next_power_of_2(max(1, pairs)), head_dim - 2 * pairs
    tile = max(1, TILE_FLOATS // max(2 * columns, triton.next_power_of_2(max(1, rest))))
    _rotate_kernel[(triton.cdiv(rows, tile),)](
        x, cos, sin, out, rows, n, PAIRS=pairs, HEAD_DIM=head_dim, INTERLEAVED=interleaved, ROWS=tile, PAIR_COLUMNS=columns,
        REST=triton.next_power_of_2(rest) if rest else 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "n"])
def _rotate_kernel(
    x,
    cos,
    sin,
    out,
    rows,
    n,
    PAIRS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    PAIR_COLUMNS: tl.constexpr,
    REST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    pair = tl.arange(0, PAIR_COLUMNS)
    mask = there[:, None] & (pair < PAIRS)[None, :]
    # A thread reads both of a pair before it writes either, so that out may be x.
    step: tl.constexpr = 2 if INTERLEAVED else 1
    second: tl.constexpr = 1 if INTERLEAVED else PAIRS
    at = row[:, None] * HEAD_DIM + pair[None, :] * step
    angle = (row % n)[:, None] * PAIRS + pair[None, :]
    c = tl.load(cos + angle, mask=mask, other=1.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)
    a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + at + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (a * c - b * s).to(out.dtype.element_ty), mask=mask)
    tl.store(out + at + second, (b * c + a * s).to(out.dtype.element_ty), mask=mask)
    if REST > 0:
        d = 2 * PAIRS + tl.arange(0, REST)
        rest = there[:, None] & (d < HEAD_DIM)[None, :]
        stays = row[:, None] * HEAD_DIM + d[None, :]
        tl.store(out + stays, tl.load(x + stays, mask=rest, other=0.0).to(out.dtype.element_ty), mask=rest)
