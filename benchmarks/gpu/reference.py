"""Attention in float64, and how far something is from it. Nothing of kvdb is used here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.results import Wrong

PIECE = 1 << 14
"""Tokens that are widened to float64 at a time."""
ERROR_MAX = 0.01
"""The largest relative error of a row of a 16-bit output. Rounding to bfloat16 alone gives up to 0.4 %, and mostly 0.17 %."""
LSE_MAX = 2e-3


@dataclass(frozen=True)
class Exact:
    """out: float64 `[q_heads, head_dim]`. lse: float64 `[q_heads]`, natural logarithm. top: the largest q.k, unscaled."""

    out: torch.Tensor
    lse: torch.Tensor
    top: torch.Tensor


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kept: torch.Tensor | None = None) -> Exact:
    """q: `[q_heads, head_dim]`. k, v: `[kv_heads, n, head_dim]`. kept: bool `[kv_heads, n]`, which tokens are attended; None for
    all. `top` is over those too."""
    kv_heads, n, _ = k.shape
    grouped = q.double().view(kv_heads, -1, q.shape[1])
    rows = grouped.shape[:2]
    top, peak = (torch.full(rows, -torch.inf, dtype=torch.float64, device=q.device) for _ in range(2))
    total, out = torch.zeros_like(top), torch.zeros_like(grouped)
    for at in range(0, n, PIECE):
        raw = scores(grouped, k, at)
        if kept is not None:
            raw = raw.masked_fill(~kept[:, None, at : at + PIECE], -torch.inf)
        top = torch.maximum(top, raw.amax(2))
        higher = torch.maximum(peak, scale * raw.amax(2))
        base = torch.where(higher.isfinite(), higher, 0.0)
        weights = torch.exp(scale * raw - base[..., None])
        shrink = torch.exp(peak - base)
        total = total * shrink + weights.sum(2)
        out = out * shrink[..., None] + weights @ v[:, at : at + PIECE].double()
        peak = higher
    out = out / torch.where(total > 0, total, 1.0)[..., None]
    lse = torch.where(total > 0, peak + torch.log(total), -torch.inf)
    return Exact(out.flatten(0, 1), lse.flatten(), top.flatten())


def scores(grouped: torch.Tensor, k: torch.Tensor, at: int) -> torch.Tensor:
    """q.k in float64, `[kv_heads, group, tokens]`, of PIECE tokens behind `at`."""
    return grouped @ k[:, at : at + PIECE].double().transpose(1, 2)


def overlooked(q: torch.Tensor, k: torch.Tensor, kept: torch.Tensor, least: torch.Tensor) -> int:
    """How often a token has at least the q.k `least`, `[q_heads]`, for a query head, and is not kept."""
    grouped = q.double().view(k.shape[0], -1, q.shape[1])
    least = least.view(*grouped.shape[:2], 1)
    count = torch.zeros((), dtype=torch.int64, device=q.device)
    for at in range(0, k.shape[1], PIECE):
        count += ((scores(grouped, k, at) >= least) & ~kept[:, None, at : at + PIECE]).sum()
    return int(count)


def stacked(exacts: list[Exact]) -> Exact:
    """The states of several sequences as one: every tensor has the sequences as its first dimension."""
    return Exact(*(torch.stack([getattr(exact, name) for exact in exacts]) for name in ("out", "lse", "top")))


def merged(state: Exact, out: torch.Tensor, lse: torch.Tensor) -> Exact:
    """With another state of these."""
    whole = torch.logaddexp(state.lse, lse)
    both = [torch.exp(part - whole)[..., None] * of for part, of in ((state.lse, state.out), (lse, out))]
    return Exact(both[0] + both[1], whole, state.top)


def off(out: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Relative error in one norm over all rows, and the largest of any row. NaN counts as infinite."""
    difference = torch.nan_to_num(out.double() - exact, nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    lengths = exact.norm(dim=-1)
    rows = difference.norm(dim=-1) / torch.where(lengths > 0, lengths, 1.0)
    return float(difference.norm() / exact.norm()), float(rows.max())


def check(
    what: str, out: torch.Tensor, lse: torch.Tensor | None, exact: Exact, error_max: float = ERROR_MAX, lse_max: float = LSE_MAX
) -> float:
    """The relative error over all rows. Raises Wrong where any row is off by more than error_max, or its lse by more than
    lse_max, and says which."""
    error, worst = off(out, exact.out)
    if not worst <= error_max:
        rows = torch.nan_to_num(out.double() - exact.out, nan=torch.inf).norm(dim=-1) / exact.out.norm(dim=-1)
        where = [int(i) for i in torch.unravel_index(rows.argmax(), rows.shape)]
        strange = int((~out.isfinite()).sum())
        raise Wrong(
            f"{what}: row {where} is off by {worst:.3g} of its length, all rows by {error:.3g}, and {strange} elements are not"
            f" finite; at most {error_max:g} is right"
        )
    if lse is not None:
        near(f"{what}, lse", lse, exact.lse, lse_max)
    return error


def near(what: str, got: torch.Tensor, expected: torch.Tensor, apart_max: float = LSE_MAX) -> None:
    """Raises Wrong where numbers are further apart than that, or than that share of the expected; equal infinities are near."""
    apart = torch.where(got == expected, 0.0, (got.double() - expected).abs() / expected.abs().clamp_min(1.0))
    apart = torch.nan_to_num(apart, nan=torch.inf)
    if not float(apart.max()) <= apart_max:
        where = [int(i) for i in torch.unravel_index(apart.argmax(), apart.shape)]
        raise Wrong(f"{what}: of row {where} off by {float(apart.max()):.3g}; at most {apart_max:g} is right")


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """For a kernel to write: full of NaN, so that what it leaves out shows."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)
