"""Pages filled with random keys and values, and dense attention in float64 over what they hold."""

import numpy as np
import torch

from kvdb.attention.triton.batch import Piece
from kvdb.attention.triton.pages import INTERPRETED, TORCH, Pages
from kvdb.storage.slot import SlotLayout

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where kernels run: a card, or the CPU under Triton's interpreter."""
LARGEST = {"float8": 448.0, "int8": 127.0}
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2, "float8": 1e-2, "int8": 1e-2}
"""The error that an output may have on a card, by the pages' format, against float64 over the same stored numbers."""


def tolerance(form: str) -> float:
    """The interpreter multiplies in float32, whatever the format."""
    return 1e-5 if INTERPRETED else max(1e-5, TOLERANCE[form])


def make_pages(layout: SlotLayout, slots: int, device=CPU) -> Pages:
    """Nothing but NaN where the format has one, so that whoever reads what was never written is found out."""
    return Pages(torch.full((slots, layout.nbytes), 0xFF, dtype=torch.uint8, device=device), layout)


def areas(pages: Pages):
    """Views of keys and values `[slots, kv_heads, block_size, head_dim]` and of their scales `[slots, kv_heads, block_size]`."""
    layout, slots = pages.layout, len(pages.slab)
    rows = (slots, layout.kv_heads, layout.block_size)
    plane = layout.kv_heads * layout.block_size
    size = plane * layout.head_dim * TORCH[layout.format].itemsize
    keys, values = (
        pages.slab[:, at : at + size].view(TORCH[layout.format]).unflatten(1, (*rows[1:], layout.head_dim))
        for at in (0, layout.values_at)
    )
    if not layout.quantised:
        return keys, values, None, None
    scales = pages.slab[:, layout.scales_at : layout.scales_at + 8 * plane].view(torch.float32).unflatten(1, (2, *rows[1:]))
    return keys, values, scales[:, 0], scales[:, 1]


def put(pages: Pages, slots, k, v) -> None:
    """k, v `[kv_heads, n, head_dim]` into these slots from their first token on, quantised as the layout says."""
    layout = pages.layout
    keys, values, key_scales, value_scales = areas(pages)
    for target, scales, rows in ((keys, key_scales, k), (values, value_scales, v)):
        for block, slot in enumerate(slots):
            part = rows[:, block * layout.block_size : (block + 1) * layout.block_size].float()
            n = part.shape[1]
            if scales is not None:
                scale = part.abs().amax(-1) / LARGEST[layout.format]
                scales[slot, :, :n] = scale
                part = part / torch.where(scale > 0, scale, 1)[..., None]
                part = part.round() if layout.format == "int8" else part
            target[slot, :, :n] = part.to(target.dtype)


def fill(pages: Pages, slots, tokens: int, seed=0, k=None, v=None) -> None:
    """Random keys and values, or those given, as the first `tokens` tokens of these slots."""
    layout, rng = pages.layout, torch.Generator().manual_seed(seed)
    shape = (layout.kv_heads, tokens, layout.head_dim)
    k = torch.randn(shape, generator=rng) if k is None else k
    v = torch.randn(shape, generator=rng) if v is None else v
    put(pages, slots, k.to(pages.slab.device), v.to(pages.slab.device))


def read(pages: Pages, slots, tokens: int):
    """Keys and values `[kv_heads, tokens, head_dim]` in float64, as these slots hold them."""
    found = []
    keys, values, key_scales, value_scales = areas(pages)
    for source, scales in ((keys, key_scales), (values, value_scales)):
        rows = source[list(map(int, slots))].double()
        if scales is not None:
            rows = rows * scales[list(map(int, slots))].double()[..., None]
        found.append(rows.transpose(0, 1).flatten(1, 2)[:, :tokens])
    return found


def attention(q, k, v, scale, visible=None):
    """q `[q_heads, n, head_dim]` over k, v `[kv_heads, tokens, head_dim]`. visible: bool, broadcast to `[q_heads, n, tokens]`.

    Returns out `[q_heads, n, head_dim]`, lse and the largest q.k, each `[q_heads, n]`, float64; 0 and -inf for the empty set.
    """
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if scores.shape[-1] == 0:
        nothing = torch.full_like(q[..., 0], -torch.inf)
        return torch.zeros_like(q), nothing, nothing
    weights = torch.softmax(scale * scores, -1).nan_to_num(0)
    out = weights @ v.repeat_interleave(group, 0)
    return out, torch.logsumexp(scale * scores, -1), scores.amax(-1)


def merge(states):
    """Attention over the union of disjoint sets, of (out, lse, top) over each."""
    outs, lses, tops = (torch.stack(part) for part in zip(*states, strict=True))
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(lse > -torch.inf, lse, 0))
    return (weights[..., None] * outs).sum(0), lse, tops.amax(0)


def rotated(x, cos, sin, interleaved: bool):
    """x `[..., head_dim]` turned by angles `[..., pairs]`, in float64 (RoFormer, arXiv 2104.09864, equation 34)."""
    y, (cos, sin), pairs = x.double().clone(), (cos.double(), sin.double()), cos.shape[-1]
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    a, b = x[..., first].double(), x[..., second].double()
    y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    return y


def turned(q, piece: Piece, angles, interleaved: bool):
    """The query as the keys of a piece see it: turned back by the piece's angles, if it was moved."""
    return q if piece.rotation < 0 else rotated(q, angles[0][piece.rotation], -angles[1][piece.rotation], interleaved)


def shown(piece: Piece, block: int):
    """Which tokens of a piece are not hidden, bool `[tokens]`. block: the tokens of a block."""
    if piece.hidden is None:
        return torch.ones(piece.tokens, dtype=torch.bool)
    flags = np.unpackbits(piece.hidden.view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(flags[:, :block].reshape(-1)[: piece.tokens] == 0)


def error(got, expected) -> float:
    """The norm of the difference over the norm of what was expected; infinite where anything is not finite."""
    difference = (got.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    return float(difference.nan_to_num(torch.inf))


def apart(got, expected) -> float:
    """The largest difference, relative to the largest of what was expected, or to 1: a logarithm may be near zero by chance."""
    difference = (got.double() - expected).abs().amax() / expected.abs().amax().clamp_min(1.0)
    return float(difference.nan_to_num(torch.inf))
