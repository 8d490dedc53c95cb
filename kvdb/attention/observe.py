"""What a search shows of its query, for the statistics of the segment that was searched."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import kvdb._native as _native
from indexes.base import Found
from kvdb.types import MEASURES, Float32, Observation

Bools = npt.NDArray[np.bool_]


def observation(  # noqa: PLR0913, PLR0917  # what a search has at hand is in no one place
    found: Found,
    kv_heads: int,
    tokens: int,
    asked: Bools | None,
    window_top: Float32,
    lse: Float32,
    scale: float,
    kind: str,
    seconds: float,
    top: Float32 | None = None,
) -> Observation:
    """What a call of one query, n = 1, showed of one part that was searched for it.

    tokens: how many were searched, at least 1. asked: bool `[kv_heads]`, those that were; None for all. window_top: float32
    `[q_heads, 1]`, the largest q.k outside of all that was searched. lse: float32 `[q_heads, 1]`, the log of the sum of
    exp(scale * q.k) over everything; given that over what was read, sharpness comes out too large by the share that was missed.
    kind: of the index. seconds: what the search took. top: float32 `[q_heads, 1]`, the largest q.k over everything, not finite
    where it is not known; None for what the window and this part show, which says nothing of queries that the search left.
    """
    if top is None:
        top = largest([found], window_top)
    values = np.empty((len(MEASURES), len(found.offsets) - 1), np.float32)
    seen = np.empty(values.shape, np.bool_)
    rows = found.offsets, found.scores, found.dense
    all_seen = _native.observe(*rows, asked, kv_heads, tokens, window_top, top, lse, scale, values, seen)
    searched = kv_heads if asked is None else max(int(np.count_nonzero(asked)), 1)
    return Observation(values, None if all_seen else seen, kind, seconds, found.scanned / searched)


def largest(founds: Sequence[Found], window_top: Float32) -> Float32:
    """The largest q.k of each query over the window and what was found of each part, float32 as `window_top`; +inf where it is
    not known, because a search left the query."""
    top = window_top.copy()
    for found in founds:
        _native.raise_top(found.offsets, found.scores, found.dense, top)
    return top
