"""Observations of searches, for the statistics of the segments that were searched."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import kvdb._native as _native
from indexes.base import SearchResult
from kvdb.types import MEASURES, Bools, Float32


@dataclass(frozen=True)
class Observation:
    """What the search of a segment showed about one query of one layer.

    values: float32 `[4, q_heads]`, one row for each of MEASURES. seen: bool `[4, q_heads]`, which of the values are known; None
    for all.
    """

    values: Float32
    seen: Bools | None


def observation(  # noqa: PLR0913, PLR0917  # what a search has at hand is in no one place
    result: SearchResult,
    kv_heads: int,
    tokens: int,
    active_heads: Bools | None,
    window_top: Float32,
    lse: Float32,
    scale: float,
    top: Float32 | None = None,
) -> Observation:
    """What the search of one part showed about a call of one query, n = 1.

    tokens: the number of searched tokens, at least 1. active_heads: bool `[kv_heads]`, the heads that were searched; None for
    all. window_top: float32 `[q_heads, 1]`, the largest q.k outside of all searched parts. lse: float32 `[q_heads, 1]`, the log
    of the sum of exp(scale * q.k) over everything; if it is the sum over the tokens read, sharpness comes out too large by the
    share that was missed. top: float32 `[q_heads, 1]`, the largest q.k over everything, not finite where it is unknown; None to
    take it from the window and this part, which is impossible for queries that the search gave up.
    """
    if top is None:
        top = largest([result], window_top)
    values = np.empty((len(MEASURES), len(result.offsets) - 1), np.float32)
    seen = np.empty(values.shape, np.bool_)
    rows = result.offsets, result.scores, result.dense
    all_seen = _native.observe(*rows, active_heads, kv_heads, tokens, window_top, top, lse, scale, values, seen)
    return Observation(values, None if all_seen else seen)


def largest(results: Sequence[SearchResult], window_top: Float32) -> Float32:
    """The largest q.k of each query over the window and the tokens found, float32 in the shape of `window_top`; +inf where it is
    unknown, because a search gave up the query."""
    top = window_top.copy()
    for result in results:
        _native.raise_top(result.offsets, result.scores, result.dense, top)
    return top
