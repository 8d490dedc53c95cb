"""How a layer's budget of error is shared out among its KV heads, by ways that were proven."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, inf, isfinite, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from query_optimizer.habit import NO_HABIT, Habit
from query_optimizer.order_statistics import joint_bounds, share_out
from query_optimizer.rule import piecewise_cost
from query_optimizer.ways import HeadShare, Way, WayFacts

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

TIME_SHARE_MAX = 0.9
"""Heads are read whole where searching would take a larger share of the time."""
TIME_SHARE_GUESS = 0.5
"""The share of the time that a way is assumed to take before it was timed."""
HEADS_AT_ONCE = 16
"""One of so many heads that break the budget together is read whole at a time, and at least one head."""
SQUARE_MAX = 1e200
"""What stands for an infinite squared error in sums."""


class Joint(NamedTuple):
    """What is known of KV heads together, by one way. rows: float32 `[n, kv_heads]`, their errors in audits of all of them, a row
    for each query; NaN is unknown. habit: what they erred in other contexts."""

    rows: Float32
    habit: Habit = NO_HABIT


Rows = Mapping[Way, Joint]


def share_budget(error_max: float, ways: Sequence[WayFacts], kv_heads: int, rows: Sequence[Rows] = ()) -> tuple[HeadShare, ...]:
    """The way of each head: of each single way for some heads, and of all ways together, what takes the least time.

    The squares of the proven bounds of single heads sum to at most error_max squared, and what the heads in use err together in
    one query is proven to keep it too, by the rows of each part. Exact for all heads where searching for some takes as long.
    """
    options = _Options.of(ways, kv_heads)
    proven = (np.flatnonzero(np.isfinite(options.bounds[1:]).any(axis=1)) + 1).tolist()
    least = {numbers: options.seconds_min(error_max, numbers) for numbers in [*((one,) for one in proven), tuple(proven)]}
    best, best_seconds = np.zeros(kv_heads, np.int64), inf
    for numbers in sorted(least, key=least.__getitem__):
        if least[numbers] > TIME_SHARE_MAX or least[numbers] >= best_seconds:
            break
        chosen = options.chosen(error_max, numbers)
        for one in rows:
            unknown = Joint(np.zeros((0, kv_heads), np.float32))
            _keep_together(error_max, chosen, {number: one.get(ways[number - 1].way, unknown) for number in numbers})
        seconds = options.seconds(chosen)
        if seconds <= TIME_SHARE_MAX and seconds < best_seconds:
            best, best_seconds = chosen, seconds
    return options.shares(error_max, best, ways)


@dataclass(frozen=True, eq=False)
class _Options:
    """What may be chosen for each head: option 0 reads it whole, the others are ways. times, bounds: float64 `[options,
    kv_heads]`, relative to reading everything, and to the layer's output; where a way waits, the bound is infinite."""

    times: Float64
    bounds: Float64

    @classmethod
    def of(cls, ways: Sequence[WayFacts], kv_heads: int) -> "_Options":
        times = [np.array(facts.given_up) + _searching_time(facts) for facts in ways]
        bounds = [np.where(facts.waits, np.inf, facts.bounds) for facts in ways]
        return cls(np.stack([np.ones(kv_heads), *times]), np.stack([np.zeros(kv_heads), *bounds]))

    def seconds_min(self, error_max: float, numbers: Sequence[int]) -> float:
        """The least time, relative to reading everything, in which heads may be answered by these ways."""
        known = list(numbers)
        usable = np.where(self.bounds[known] <= error_max, self.times[known], 1)
        return float(np.minimum(usable.min(axis=0, initial=1), 1).mean())

    def chosen(self, error_max: float, numbers: Sequence[int]) -> Int64:
        """The number of each head's option, where it may be one of these ways."""
        known = np.array([0, *numbers])
        return known[share_out(error_max, np.stack([self.times[known], self.bounds[known]]).transpose(2, 1, 0))]

    def seconds(self, chosen: Int64) -> float:
        """The time that these options take, relative to reading everything."""
        searched = np.flatnonzero(chosen)
        searching = float(self.times[chosen[searched], searched].sum()) / len(chosen)
        return searching + piecewise_cost(1 - len(searched) / len(chosen))

    def shares(self, error_max: float, chosen: Int64, ways: Sequence[WayFacts]) -> tuple[HeadShare, ...]:
        """What each head may err by these options. What is left of the budget is given out in equal squares."""
        bounds = self.bounds[chosen, np.arange(len(chosen))].tolist()
        left = max(error_max**2 - sum(bound**2 for bound in bounds), 0.0) / max(int(np.count_nonzero(chosen)), 1)

        def share(head: int, number: int) -> HeadShare:
            if not number:
                return HeadShare()
            facts = ways[number - 1]
            return HeadShare(facts.way, bounds[head], sqrt(bounds[head] ** 2 + left), facts.audits[head])

        return tuple(share(head, number) for head, number in enumerate(chosen.tolist()))


@dataclass(frozen=True, eq=False)
class _Audits:
    """Audits of one way. squares: float64 `[n, kv_heads]`, squared errors, 0 where a head was not compared. unknown: float64
    `[n, kv_heads]`, 1 there and 0 elsewhere."""

    squares: Float64
    unknown: Float64

    @classmethod
    def of(cls, rows: Float32) -> "_Audits":
        squares = np.nan_to_num(rows.astype(np.float64) ** 2, nan=0.0, posinf=SQUARE_MAX)
        return cls(squares, np.isnan(rows).astype(np.float64))


class _HeadGroup:
    """The heads that one way answers. errors: float64 `[n]`, what they err together, by query in which all were compared."""

    def __init__(self, known: Joint, heads: npt.NDArray[np.bool_]) -> None:
        self._audits = _Audits.of(known.rows)
        self._habit = known.habit
        self._heads = heads
        self._sum()

    @property
    def habitual_bound(self) -> float:
        """What the heads err together, by audits that are too few but for what other contexts showed."""
        return self._habit.proves(self.errors, self._heads)

    @property
    def empty(self) -> bool:
        return not self._heads.any()

    def drop(self, heads: Int64) -> None:
        """Go on without these heads."""
        self._heads[heads] = False
        self._sum()

    def faults(self, error_max: float, *, bounded: bool) -> Float64:
        """The squared errors of each head in queries that break the budget, or in all where none does; -1 for heads of other
        groups. bounded: whether there are queries enough for a bound; where not, who was compared least is worst, and worse than
        any of a group that has a bound."""
        if not bounded:
            return np.where(self._heads, SQUARE_MAX * (1 + self._audits.unknown.sum(axis=0)), -1)
        over = self._compared & (self._sums > error_max**2)
        counted = (over if over.any() else self._compared).astype(np.float64)
        return np.where(self._heads, counted @ self._audits.squares, -1)

    def _sum(self) -> None:
        heads = self._heads.astype(np.float64)
        self._compared = self._audits.unknown @ heads == 0
        self._sums = self._audits.squares @ heads
        self.errors = np.sqrt(self._sums[self._compared])


def _keep_together(error_max: float, chosen: Int64, known: Mapping[int, Joint]) -> None:
    """Read heads whole, one after the other, until the others are proven to keep the budget together: each time the head that
    errs most in the queries that break it, or several of very many. Heads may err rarely, and each in other queries. chosen:
    changed in place. known: by number of a way."""
    groups = {number: _HeadGroup(known[number], chosen == number) for number in sorted(set(chosen.tolist()) - {0})}
    while groups:
        bounds = joint_bounds([group.errors for group in groups.values()])
        if len(groups) == 1 and not isfinite(bounds[0]):
            bounds = [group.habitual_bound for group in groups.values()]
        if hypot(*bounds) <= error_max:
            return
        faults = {
            number: group.faults(error_max, bounded=isfinite(bound))
            for (number, group), bound in zip(groups.items(), bounds, strict=True)
        }
        number = max(faults, key=lambda one: float(faults[one].max()))
        heads = np.argsort(-faults[number])[: max(1, np.count_nonzero(chosen == number) // HEADS_AT_ONCE)]
        chosen[heads] = 0
        groups[number].drop(heads)
        if groups[number].empty:
            del groups[number]


def head_time(facts: WayFacts, head: int) -> float:
    """The time of answering a head, relative to reading it whole; a head that a search gives up on is read whole behind it."""
    return _searching_time(facts) + facts.given_up[head]


def _searching_time(facts: WayFacts) -> float:
    return TIME_SHARE_GUESS if facts.time_share is None else facts.time_share
