"""What a query and its searches show for nothing, by which a query is told that is unlike those for which its way was proven."""

import numpy as np

from indexes.base import Float32
from kvdb.attention.partition import HeadMask
from kvdb.types import Array

SIGNS = 4
"""The logarithm of the query's length; that of the sum of exp(scale * q.k) over what was read; that of the bound on the sum over
what was not, relative to it; and the largest scale * q.k, but for the sinks. `StepRun::signs`
(`kvdb/native/steps/step_run.cpp`) makes the same."""
SIGN_MAX = 1e4
"""A sign beyond this, or one that is no number, counts as this."""


def signs_of(q: Array, lse: Float32, bound: Float32, top: Float32) -> Float32:
    """The signs of queries q, `[q_heads, n, head_dim]`: float32 `[SIGNS, q_heads, n]`, lse, bound, top: float32 `[q_heads,
    n]`; top is NaN where it is not known."""
    with np.errstate(divide="ignore", invalid="ignore"):
        length = np.log(np.linalg.norm(q.astype(np.float64), axis=2))
        signs = np.stack([length, lse, bound - lse])
    limited = np.nan_to_num(np.clip(signs, -SIGN_MAX, SIGN_MAX), nan=SIGN_MAX)
    return np.concatenate([limited, np.clip(top, -SIGN_MAX, SIGN_MAX)[None]]).astype(np.float32)


def outside(signs: Float32, ranges: Float32, kv_heads: int) -> HeadMask:
    """The KV heads and queries of which a sign is outside of its range, bool `[kv_heads, n]`. NaN is in every range.

    signs: `[SIGNS, q_heads, n]`. ranges: float32 `[2, SIGNS, q_heads]`, the least and the largest."""
    least, most = ranges[..., None]
    rows = ((signs < least) | (signs > most)).any(axis=0)
    return np.asarray(rows.reshape(kv_heads, -1, signs.shape[2]).any(axis=1), np.bool_)


def unlike_heads(signs: Float32, ranges: Float32 | None, kv_heads: int) -> HeadMask | None:
    """The KV heads that are `outside` of their ranges for some query, bool `[kv_heads]`, None for none. ranges: None for no
    ranges."""
    if ranges is None:
        return None
    heads: HeadMask = np.logical_or.reduce(outside(signs, ranges, kv_heads), axis=1)
    return heads if heads.any() else None
