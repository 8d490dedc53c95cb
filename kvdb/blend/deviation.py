"""How far fresh keys and values of a token are from its stored ones.

A chunk computed alone knows nothing of what now stands before it; the tokens whose KV would differ most are those that read most
of it (CacheBlend, arXiv 2405.16444, section 4). Each score is one function; which tells best is for a measurement to say.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvdb.errors import InvalidArgument
from kvdb.types import Array, Float32


def deviation(k: Array, v: Array, stored_k: Array, stored_v: Array, score: str | None = None) -> Float32:
    """One score a token, float32 `[n]`, the larger the farther; 0 for equal KV.

    k, v: fresh; stored_k, stored_v: of the same tokens, moved to where these stand; all `[kv_heads, n, head_dim]`. score: a name
    of SCORES, None for DEFAULT_SCORE. Tokens of which anything that is looked at is NaN or infinite have the score +inf, for
    nothing is known of them. Raises InvalidArgument for an unknown score.
    """
    measured = SCORES[score_name(score)]
    with np.errstate(all="ignore"):
        scores = measured(Change(Moved(k, stored_k), Moved(v, stored_v)))
    return np.where(np.isfinite(scores), scores, np.inf).astype(np.float32)


def score_name(given: str | None) -> str:
    """The name of a score, DEFAULT_SCORE for None. Raises InvalidArgument."""
    name = DEFAULT_SCORE if given is None else given
    if str(name) not in SCORES:
        raise InvalidArgument(f"no score of deviation is named {name!r}; expected one of {', '.join(SCORES)}")
    return name


def spread(scores: Float32, positions: npt.NDArray[np.int64], width: int) -> Float32:
    """Scores `[n]` raised to the largest of any token up to `width` positions before: those read it, so they deviate next.

    positions: int64 `[n]`, strictly ascending. Infinite scores stay where they are: a token without stored KV says nothing of
    those behind it.
    """
    n = len(scores)
    known = np.where(np.isfinite(scores), scores, -np.inf)
    begin = np.searchsorted(positions, positions - width)
    lengths = np.arange(1, n + 1) - begin
    # levels[i][t] is the largest of the 2^i tokens that end with t; two that overlap cover any window.
    levels = np.frexp(lengths)[1] - 1
    raised, reach, largest = known.copy(), 1, known
    for level in range(int(levels.max(initial=0)) + 1):
        of_level = np.flatnonzero(levels == level)
        raised[of_level] = np.maximum(largest[of_level], largest[begin[of_level] + reach - 1])
        largest = np.maximum(largest, np.concatenate([np.full(min(reach, n), -np.inf, known.dtype), largest[:-reach]]))
        reach *= 2
    return np.where(np.isfinite(scores), raised, scores)


@dataclass(frozen=True, eq=False)
class Moved:
    """Fresh vectors beside stored ones, both `[kv_heads, n, head_dim]`."""

    fresh: Array
    stored: Array

    @cached_property
    def norms(self) -> tuple[Float32, Float32, Float32]:
        """Of the difference, the fresh and the stored vectors, for each head and token `[kv_heads, n]`."""
        fresh, stored = np.asarray(self.fresh, np.float32), np.asarray(self.stored, np.float32)
        return _norms(fresh - stored), _norms(fresh), _norms(stored)

    @cached_property
    def distance(self) -> Float32:
        """The norm of the difference over all heads, `[n]`."""
        return _together(self.norms[0])

    @cached_property
    def size(self) -> Float32:
        """The larger of both norms over all heads, `[n]`."""
        return np.maximum(_together(self.norms[1]), _together(self.norms[2]))

    @property
    def relative(self) -> Float32:
        """The difference in parts of the size, 0 to 2 and 0 where both are 0; `[n]`."""
        return _share(self.distance, self.size)

    @property
    def of_mean(self) -> Float32:
        """The difference in parts of the mean size of all tokens whose size is finite, `[n]`."""
        known = self.size[np.isfinite(self.size)]
        return _share(self.distance, np.full_like(self.size, known.sum() / max(len(known), 1)))

    @property
    def of_heads(self) -> Float32:
        """As relative, of each head `[kv_heads, n]`."""
        difference, fresh, stored = self.norms
        return _share(difference, np.maximum(fresh, stored))


@dataclass(frozen=True, eq=False)
class Change:
    """What a score sees."""

    keys: Moved
    values: Moved


Score: TypeAlias = Callable[[Change], Float32]


def _keys(change: Change) -> Float32:
    return change.keys.relative


def _values(change: Change) -> Float32:
    return change.values.relative


def _both(change: Change) -> Float32:
    return change.keys.relative + change.values.relative


def _product(change: Change) -> Float32:
    """Large where keys and values both are far: noise moves the one or the other."""
    return change.keys.relative * change.values.relative


def _weighted(change: Change) -> Float32:
    """How far keys moved, each head's weighted by the length of the value that they let in, fresh or stored: tokens that bring
    little into any output do not count, however far they moved."""
    moved, (_, fresh, stored) = change.keys.norms[0], change.values.norms
    return np.asarray((moved * np.maximum(fresh, stored)).sum(axis=0), np.float32)


def _absolute(change: Change) -> Float32:
    return change.keys.distance + change.values.distance


def _mean(change: Change) -> Float32:
    """As absolute, but neither keys nor values count more for being longer."""
    return change.keys.of_mean + change.values.of_mean


def _head(change: Change) -> Float32:
    """Of the head that moved farthest: one that looks at other chunks is not lost among those that do not."""
    return np.asarray((change.keys.of_heads + change.values.of_heads).max(axis=0, initial=0), np.float32)


SCORES: Mapping[str, Score] = {
    "keys": _keys,
    "values": _values,
    "both": _both,
    "product": _product,
    "weighted": _weighted,
    "absolute": _absolute,
    "mean": _mean,
    "head": _head,
}
DEFAULT_SCORE = "weighted"


def _norms(vectors: Float32) -> Float32:
    return np.asarray(np.sqrt(np.einsum("hnd,hnd->hn", vectors, vectors)), np.float32)


def _together(heads: Float32) -> Float32:
    return np.asarray(np.sqrt(np.einsum("hn,hn->n", heads, heads)), np.float32)


def _share(part: Float32, whole: Float32) -> Float32:
    """0 where both are 0; NaN stays NaN."""
    return np.asarray(np.where(part == 0, 0, part / whole) * np.where(np.isfinite(whole), 1, np.nan), np.float32)
