"""How much a query may want, for the formulas of costs: what is known of its heads, or a guess."""

import math
from dataclasses import dataclass
from typing import Self

from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP

GUESS = 72.0
"""Tokens that a query wants of which nothing is known: a guess, that its heads are sharp."""
SPREAD, SPREAD_POWER = 18.0, 0.55
"""A head that wants SPREAD * alpha ** -SPREAD_POWER tokens is as likely a diffuse one as a sharp one. The more tokens come in as
alpha falls, the less do the few best stand out. Set between the sharp heads of `benchmarks/workloads.py` and the diffuse ones,
and those of a trained model."""
STEEPNESS = 12.0
MANY = 0.04
"""Of the tokens: of more, `kvdb.attention` reads all rather than pick their values."""

EXPONENT_MAX = 700.0
"""Of which float64 has the exponential."""


@dataclass(frozen=True)
class Demand:
    """What each query of a search wants of `tokens` tokens.

    alpha: of the range, a range that does for what is asked; None for the largest k. wanted: tokens, the mean. spread: how likely
    the heads are diffuse, so that scores of representatives and lengths of keys tell little: 0 to 1.
    """

    tokens: int
    alpha: float | None
    wanted: float
    spread: float

    @classmethod
    def of(cls, retrieval: Retrieval, tokens: int, wanted: float | None) -> Self:
        """wanted: as `Index.cost` takes it."""
        match retrieval:
            case TopK(k):
                return cls(tokens, None, float(min(k, tokens)), 0.5)  # that so many are wanted says nothing of the heads
            case Dipr(alpha):
                pass
            case TopP(p):
                alpha = min(max(1 - p, 1e-6), 1e-2)
            case Exact():
                return cls(tokens, 1.0, float(tokens), 1.0)
        many = min(GUESS if wanted is None else max(wanted, 0.0), float(tokens))
        return cls(tokens, alpha, many, rising(many, SPREAD * alpha**-SPREAD_POWER, STEEPNESS))

    @property
    def crowded(self) -> float:
        """How likely so many tokens are found that all are read."""
        return rising(self.wanted, MANY * self.tokens, STEEPNESS)


def rising(x: float, middle: float, power: float) -> float:
    """From 0 to 1 as x goes from 0 to infinity, one half at `middle`."""
    if x <= 0 or middle <= 0:
        return float(x > 0)
    return 1 / (1 + math.exp(min(power * (math.log(middle) - math.log(x)), EXPONENT_MAX)))
