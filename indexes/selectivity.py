"""How many tokens a query is expected to retrieve, for the formulas of costs: from what is known about its heads, or a guess."""

import math
from dataclasses import dataclass
from typing import Self

from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP

GUESS = 72.0
"""The number of tokens that a query is assumed to retrieve where nothing is known about its heads: they are taken to be sharp."""
SPREAD, SPREAD_POWER = 18.0, 0.55
"""A head that retrieves SPREAD * alpha ** -SPREAD_POWER tokens is as likely diffuse as sharp; a head that retrieves more is
rather diffuse. The constants lie between the sharp and the diffuse heads of `benchmarks/workloads.py` and of a trained model."""
STEEPNESS = 12.0
"""How fast likelihoods rise from 0 to 1 around a number of tokens."""
MANY = 0.04
"""Where a search finds more than this share of the tokens, `kvdb.attention` reads all of them instead of picking their values."""
EXPONENT_MAX = 700.0
"""The largest exponent whose exponential float64 can hold."""


@dataclass(frozen=True)
class Selectivity:
    """How many of `tokens` tokens each query of a search is expected to retrieve.

    alpha: the alpha of a range that answers the retrieval; None for the k largest. expected_tokens: the mean number of tokens
    retrieved. spread: how likely the heads are diffuse, in which case representatives and lengths of keys exclude little; 0 to 1.
    """

    tokens: int
    alpha: float | None
    expected_tokens: float
    spread: float

    @classmethod
    def of(cls, retrieval: Retrieval, tokens: int, expected_tokens: float | None) -> Self:
        """The selectivity of a retrieval. expected_tokens: as `Index.cost` takes it."""
        match retrieval:
            case TopK(k):
                return cls(tokens, None, float(min(k, tokens)), 0.5)  # k says nothing about the heads
            case Dipr(alpha):
                pass
            case TopP(p):
                alpha = min(max(1 - p, 1e-6), 1e-2)
            case Exact():
                return cls(tokens, 1.0, float(tokens), 1.0)
        many = min(GUESS if expected_tokens is None else max(expected_tokens, 0.0), float(tokens))
        return cls(tokens, alpha, many, rising(many, SPREAD * alpha**-SPREAD_POWER, STEEPNESS))

    @property
    def crowded(self) -> float:
        """How likely it is that more than MANY of the tokens are found, so that all are read."""
        return rising(self.expected_tokens, MANY * self.tokens, STEEPNESS)


def rising(x: float, middle: float, power: float) -> float:
    """A value that rises from 0 to 1 as x goes from 0 to infinity, and is one half at `middle`."""
    if x <= 0 or middle <= 0:
        return float(x > 0)
    return 1 / (1 + math.exp(min(power * (math.log(middle) - math.log(x)), EXPONENT_MAX)))
