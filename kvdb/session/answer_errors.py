"""What an answer shows beside the exact one: the error of each KV head, and what the search left out."""

import numpy as np

from kvdb.attention.exact import AttentionStats
from kvdb.types import Array, Bools, Float32


def head_errors(out: Array, exact: Array, kv_heads: int) -> Float32:
    """The error of each KV head, float32 `[kv_heads, n]`: the L2 norm of its query heads' differences, relative to that of the
    whole exact output. out, exact: `[q_heads, n, head_dim]`."""
    right = exact.astype(np.float64)
    squares = ((out.astype(np.float64) - right) ** 2).sum(axis=2).reshape(kv_heads, -1, out.shape[1]).sum(axis=1)
    norms = (right**2).sum(axis=(0, 2))
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.sqrt(squares / norms)
    return np.where(squares == 0, 0, errors).astype(np.float32)


def given_up_heads(stats: AttentionStats, kv_heads: int, n: int) -> Bools:
    """The KV heads that were read whole because a search gave up on a query, bool `[kv_heads, n]`."""
    heads = np.full((kv_heads, n), stats.missed_log is None)
    if stats.given_up is not None:
        heads |= stats.given_up.reshape(kv_heads, -1, n).any(axis=1)
    return heads


def largest_missed(stats: AttentionStats, shape: tuple[int, ...]) -> Float32:
    """The logarithm of what was left out relative to what was read, of the query head with the most: float32 of that shape."""
    if stats.missed_log is None or stats.lse is None:
        return np.full(shape, -np.inf, np.float32)
    missed: Float32 = (stats.missed_log - stats.lse).reshape(shape[0], -1, shape[1]).max(axis=1)
    return missed
