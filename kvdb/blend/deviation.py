"""Measures how far the fresh keys and values of a token are from its stored ones.

A chunk computed alone knows nothing of what now stands before it; the tokens whose KV would differ most are those that attend to
it most (CacheBlend, arXiv 2405.16444, section 4). Each score is two functions: one measures a token by itself, so that tokens may
be measured in any pieces, and one makes scores of what was measured of all tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvdb.errors import InvalidArgument
from kvdb.types import Array, Float32


def measured(k: Array, v: Array, stored_k: Array, stored_v: Array, score: str | None = None) -> Float32:
    """Two measures of each token, float32 `[2, n]`, which depend on no other token; `deviation` makes scores of them.

    k, v: the fresh ones. stored_k, stored_v: those of the same tokens, moved to the same positions. All are `[kv_heads, n,
    head_dim]`. score: a name of SCORES, None for DEFAULT_SCORE. Raises InvalidArgument for an unknown score.
    """
    chosen = SCORES[score_name(score)]
    with np.errstate(all="ignore"):
        return np.stack(chosen.measured(Moved(k, stored_k), Moved(v, stored_v)))


def deviation(measures: Float32, score: str | None = None) -> Float32:
    """One score for each token, float32 `[n]`: 0 for equal KV, larger the farther they are apart.

    measures: float32 `[2, n]`, as `measured` made them for the same score, of all tokens that are compared. If a measure of a
    token is NaN or infinite, the score is +inf. Raises InvalidArgument for an unknown score.
    """
    chosen = SCORES[score_name(score)]
    with np.errstate(all="ignore"):
        scores = chosen.combined(*measures)
    return np.where(np.isfinite(scores) & np.isfinite(measures).all(axis=0), scores, np.inf).astype(np.float32)


def score_name(given: str | None) -> str:
    """The name of a score, DEFAULT_SCORE for None. Raises InvalidArgument."""
    name = DEFAULT_SCORE if given is None else given
    if str(name) not in SCORES:
        raise InvalidArgument(f"no score of deviation is named {name!r}; expected one of {', '.join(SCORES)}")
    return name


@dataclass(frozen=True, eq=False)
class Moved:
    """Fresh vectors beside stored ones, both `[kv_heads, n, head_dim]`."""

    fresh: Array
    stored: Array

    @cached_property
    def norms(self) -> tuple[Float32, Float32, Float32]:
        """The norms of the difference, the fresh and the stored vectors, for each head and token `[kv_heads, n]`."""
        fresh, stored = np.asarray(self.fresh, np.float32), np.asarray(self.stored, np.float32)
        return _norms(fresh - stored), _norms(fresh), _norms(stored)

    @property
    def relative(self) -> Float32:
        """The difference over all heads, relative to the larger of both sizes: 0 to 2, and 0 where both are 0; `[n]`."""
        difference, fresh, stored = (np.sqrt(np.einsum("hn,hn->n", norms, norms)) for norms in self.norms)
        size = np.maximum(fresh, stored)
        share = np.where(difference == 0, 0, difference / size) * np.where(np.isfinite(size), 1, np.nan)  # NaN stays NaN
        return np.asarray(share, np.float32)


@dataclass(frozen=True)
class Score:
    """measured: the two measures of each token, `[n]` each, of a layer's keys and values. combined: the scores `[n]` of both."""

    measured: Callable[[Moved, Moved], tuple[Float32, Float32]]
    combined: Callable[[Float32, Float32], Float32]


def distance_and_size(keys: Moved, values: Moved) -> tuple[Float32, Float32]:
    """How far the keys moved, and how large they are, where each head is weighted by the length of the value behind the key,
    fresh or stored."""
    (moved, *keys_sizes), (_, *values_sizes) = keys.norms, values.norms
    lets_in = np.maximum(*values_sizes)
    return (moved * lets_in).sum(axis=0), (np.maximum(*keys_sizes) * lets_in).sum(axis=0)


def in_parts_of_the_mean(distance: Float32, size: Float32) -> Float32:
    """The distance of each token in parts of the mean size. The mean over tokens is 0 where nothing moved, and about 1 where all
    keys are of another text."""
    known = size[np.isfinite(size)]
    mean = known.mean() if known.size else 1.0
    return np.asarray(np.where(distance == 0, 0, distance / mean), np.float32)


def relative(keys: Moved, values: Moved) -> tuple[Float32, Float32]:
    """How far keys moved, and how far values did, each relative to its size."""
    return keys.relative, values.relative


SCORES: Mapping[str, Score] = {"weighted": Score(distance_and_size, in_parts_of_the_mean), "relative": Score(relative, np.add)}
"""weighted: tokens that add little to any output hardly count, however far they moved; of all scores that were measured, this one
chooses best which tokens to recompute (benchmarks/README.md, "Blending: quality"). relative: keys and values add up, to 0 for the
same token and about 2 for another text."""
DEFAULT_SCORE = "weighted"


def _norms(vectors: Float32) -> Float32:
    return np.asarray(np.sqrt(np.einsum("hnd,hnd->hn", vectors, vectors)), np.float32)
