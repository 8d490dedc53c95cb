"""What a way of answering erred in other contexts of the same model, and how much less has to be measured for that in a new one.

Contexts of one model, of about the same length, are taken to be exchangeable: the new one is as likely as any other to be the one
in which a way errs most. So, of s others, it exceeds them all with a chance of 1 / (s + 1). Their bounds hold with a confidence
of 95 % each, so that it exceeds the largest of these bounds with a chance of 1 / (s + 1) + 0.05. If it does, more than 5 % of its
queries err more than that bound, and k audits all stay within it with a chance of less than 0.95^k. Both have to happen for a
wrong proof. A proof from nothing takes 59 audits because 0.95^59 < 0.05; here k suffice where the product is below that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from query_optimizer.order_statistics import AUDITS_MIN, CONFIDENCE, QUANTILE, lower_bound, upper_bound

Bools = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

HABIT_AUDITS_MIN = math.ceil(AUDITS_MIN / 3)
"""So many audits are made however many contexts speak for a way. They alone, whatever the others were like, find a way that errs
too much in 14 % of queries, with a confidence of 95 %."""


def audits_needed(contexts: int) -> int:
    """The audits that prove a way which was proven in so many other contexts."""
    exceeds = 1 / (contexts + 1) + (1 - CONFIDENCE)
    needed = math.ceil(math.log((1 - CONFIDENCE) / exceeds) / math.log(QUANTILE))
    return min(max(needed, HABIT_AUDITS_MIN), AUDITS_MIN)


@dataclass(frozen=True, eq=False)
class OtherContext:
    """The audits of a way in another context. rows: float32 `[n, kv_heads]`, the errors of the last, NaN where a head was not
    compared. withdrawn: bool `[kv_heads]`, where the way broke its word there."""

    rows: Float32
    withdrawn: Bools


class Habit:
    """What a way erred in other contexts."""

    def __init__(self, contexts: Sequence[OtherContext]) -> None:
        self._contexts = contexts
        self._known: dict[bytes, tuple[int, float]] = {}

    def of(self, heads: Bools) -> tuple[int, float]:
        """How many audits prove the way for these KV heads together, bool `[kv_heads]`, and what their error is at least said to
        be then: what it was proven not to exceed in any other context. Infinite where nothing is known, and where the way was
        refuted."""
        key = heads.tobytes()
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._of(heads)
        return known

    def proves(self, errors: npt.NDArray[np.floating], heads: Bools) -> float:
        """The bound of what these heads err together, from audits `[n]` in this context; infinite where they are too few."""
        needed, bound = self.of(heads)
        return max(bound, float(errors.max())) if len(errors) >= needed else math.inf

    def _of(self, heads: Bools) -> tuple[int, float]:
        together = [one for one in self._contexts if not np.isnan(one.rows[:, heads]).any(axis=1).all()]
        if any(one.withdrawn[heads].any() for one in self._contexts):
            return AUDITS_MIN, math.inf
        errors = [_joint(one.rows[:, heads]) for one in together]
        whole = [one for one in errors if len(one) >= AUDITS_MIN]
        bound = max((float(upper_bound(one)) for one in whole), default=math.inf)
        if any(float(lower_bound(one)) > bound for one in errors if len(one) < AUDITS_MIN):
            return AUDITS_MIN, math.inf
        return audits_needed(len(whole)), bound


NO_HABIT = Habit(())
"""Nothing is known of other contexts."""


def _joint(rows: Float32) -> Float64:
    """What heads err together, `[n]`, in the queries in which all were compared."""
    squares = (rows.astype(np.float64) ** 2).sum(axis=1)
    known: Float64 = np.sqrt(squares[~np.isnan(squares)])
    return known
