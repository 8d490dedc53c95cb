"""Computes how many tokens go on from each layer, and which."""

import numpy as np
import numpy.typing as npt

from kvdb.types import Float32

Flags = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]


def keep(scores: Float32, count: int) -> Flags:
    """A mask, bool `[n]`, of the `count` largest scores `[n]`; among equal ones, those that come first.

    Scores of +inf and NaN are always kept, even if they are more than `count`.
    """
    n = len(scores)
    if count >= n:
        return np.ones(n, np.bool_)
    ranked = np.where(np.isnan(scores), np.inf, scores)
    flags = np.isposinf(ranked)
    if count > flags.sum():
        least = np.partition(ranked, n - count)[n - count]
        flags = ranked > least
        flags[np.flatnonzero(ranked == least)[: count - flags.sum()]] = True
    return flags


STEPS = 3
"""The number of steps in which the shares fall. Each step costs the keys and values of one layer, which choose the tokens."""


def gradual(layers: int, ratio: float, first: int = 1, steepness: float = 0.0) -> Float64:
    """The share of tokens that each layer recomputes, float64 `[layers]`.

    Layers before `first` choose no tokens, and have the share 0. From there on, the shares fall in STEPS steps around a straight
    line from ratio * (1 + steepness) to ratio * (1 - steepness), because tokens that deviate much in one layer do so in the next
    (CacheBlend, arXiv 2405.16444, section 4.3, gradual filtering). Their mean is `ratio`; near 1 the steps are lower, so that
    none is above 1. steepness: 0 to 1.
    """
    count = max(layers - first, 0)
    slope = min(steepness, 1 / ratio - 1) if ratio > 0 else 0.0
    line = np.linspace(slope, -slope, count) if count > 1 else np.zeros(count)
    steps = np.array_split(line, min(STEPS, max(count, 1)))
    fall = np.concatenate([np.full(len(step), step.mean()) if len(step) else step for step in steps])
    return np.concatenate([np.zeros(layers - count), ratio * (1 + fall)])


def counts(ratios: Float64, tokens: int) -> npt.NDArray[np.int64]:
    """The number of tokens for each share of `ratios`, int64; their sum equals the sum of the shares to within one token.

    Each is within one token of its own share. After the largest share (the first one, if there are several), numbers never rise.
    """
    until = np.rint(np.concatenate([[0], np.cumsum(ratios * tokens)])).astype(np.int64)
    rounded: npt.NDArray[np.int64] = np.diff(until)
    largest = int(np.argmax(ratios)) if len(ratios) else 0
    rounded[largest:] = np.sort(rounded[largest:])[::-1]
    return rounded.clip(0, tokens)
