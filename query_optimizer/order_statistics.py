"""Confidence bounds of measured errors, whatever their distribution, and the division of an error budget among heads.

Of n independent samples, the number below a quantile has a binomial distribution whatever the samples are like. So ranks can be
named in advance between whose samples the quantile lies with a given confidence (order statistics). The confidence is that of one
look at samples whose number was settled before: whoever looks after every sample, and stops at the first look that pleases,
errs more often.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Samples = npt.NDArray[np.floating]

QUANTILE = 0.95
CONFIDENCE = 0.95
ROUNDING = 1 + 1e-12
"""A chance that equals the doubt is not to be missed by what floats lose."""
POWERS = 6
"""The number of queues that are made at once; most budgets need no more."""


@lru_cache(maxsize=4096)
def rank_of_bound(n: int, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> int | None:
    """The smallest rank, 1 being the smallest sample, at which one of n samples is at least the quantile, with this confidence.

    None where n samples are too few for any; from 59 on the largest is enough for 0.95 and 0.95. Both lie in (0, 1).
    """
    _check(quantile, confidence)
    rank, above = n + 1, 0.0
    for r in range(n, 0, -1):
        above += _binomial(n, r, quantile)  # the chance that r samples or more lie below the quantile, and so the r-th does
        if above > (1 - confidence) * ROUNDING:
            break
        rank = r
    return rank if rank <= n else None


@lru_cache(maxsize=4096)
def lower_rank(n: int, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> int | None:
    """The largest rank at which one of n samples is at most the quantile, with this confidence. None where there is none."""
    rank = rank_of_bound(n, 1 - quantile, confidence)  # the same of the samples with their signs changed
    return None if rank is None else n + 1 - rank


def upper_bound(samples: Samples, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> Float64:
    """An upper bound of the quantile of each column, with this confidence: float64 `[...]` for samples `[n, ...]`.

    Infinite where n samples are too few, and where too many of them are NaN or infinite.
    """
    rank = rank_of_bound(len(samples), quantile, confidence)
    return np.full(samples.shape[1:], np.inf) if rank is None else _ranked(samples, rank)


def lower_bound(samples: Samples, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> Float64:
    """A lower bound of the quantile of each column, with this confidence: float64 `[...]` for samples `[n, ...]`.

    Minus infinity where n samples are too few. NaN counts as the largest of all.
    """
    rank = lower_rank(len(samples), quantile, confidence)
    return np.full(samples.shape[1:], -np.inf) if rank is None else _ranked(samples, rank)


def joint_bounds(groups: Sequence[Samples], quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> list[float]:
    """A bound for each group of heads. The root of the sum of their squares is an upper bound of the quantile of the error of all
    heads together, with this confidence.

    groups: for each way of answering that is in use, the joint error of the heads that it answers, `[n]`, one for each query;
    errors of heads add up in squares. Heads may each exceed a bound in few queries, but in different ones, so that some head does
    in many queries. Bounds of single heads do not show that; joint errors do. Ways were measured on different queries, so each of
    m ways gets an m-th of the share of queries above the quantile, and of the doubt (a union bound).
    """
    share = 1 / max(1, len(groups))
    return [float(upper_bound(group, 1 - (1 - quantile) * share, 1 - (1 - confidence) * share)) for group in groups]


def share_out(budget: float, options: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Choose an option for each head so that all together take few seconds, and the squares of their errors sum to at most
    budget squared.

    options: `[heads, options, 2]`, pairs of seconds and error, of which each head has one of error 0; what a head does not have
    has an error of infinity. Returns the number of each head's option, `[heads]`. Raises ValueError for a head without an option
    of error 0, and for a budget that is no number.

    More budget never takes more seconds, and at least a third of the seconds that the best choice saves are saved.

    Each head moves from its exact option to faster ones, in the order of seconds saved per squared error. The moves of all heads
    stand in one queue, and are made until the first that does not fit. A large option may block the queue, so this is repeated
    without the options above a power of two, for each power that is at most the budget. The one option that saves most by itself
    is tried too. Proof of the third: the best choice has at most one option above the largest of these powers, which saves no
    more than the best single one; and the queue of the others falls short of the optimum by less than the option that did not
    fit, which saves no more than the best single one either.
    """
    pairs = np.asarray(options, np.float64)
    if not 0 <= budget < math.inf:
        raise ValueError(f"budget is {budget!r}; expected a number from 0 on")
    spendable = budget * budget
    unsorted, errors = pairs.transpose(2, 1, 0)
    heads = np.arange(len(pairs))
    order = np.lexsort((unsorted, errors), axis=0)
    seconds, costs = unsorted[order, heads], errors[order, heads] ** 2
    if costs[0].any():
        raise ValueError("a head has no option without error; expected one of each")
    saved = np.where(costs <= spendable, seconds[0] - seconds, -np.inf)
    best, best_saved = np.zeros(len(pairs), np.int64), 0.0
    option, head = divmod(int(saved.argmax()), len(pairs))
    if saved[option, head] > 0:
        best[head], best_saved = option, float(saved[option, head])
    for choices in _queues(spendable, saved, costs):
        totals = saved[choices, heads].sum(axis=1)
        most = int(totals.argmax())
        if totals[most] > best_saved:
            best, best_saved = choices[most], float(totals[most])
    chosen: npt.NDArray[np.int64] = order[best, heads]
    return chosen


def _queues(spendable: float, saved: Float64, costs: Float64) -> Iterator[npt.NDArray[np.int64]]:
    """The options that each queue takes, by number, `[POWERS, heads]`, a row for each queue: without options above the largest
    power of two that can be spent, half of that, and so on until everything fits. saved, costs: `[options, heads]`, by cost, the
    first being exact.

    An option is a corner of its head's concave hull when more is gained by coming to it, from any option of less cost, than by
    going on from it to any that is allowed. The gain of coming to it is the same whatever is allowed, so all queues have one
    order.
    """
    numbers, heads = np.arange(len(costs)), np.arange(costs.shape[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = (saved - saved[:, None]) / (costs - costs[:, None])  # [from, to, heads]
    slopes[np.isnan(slopes)] = -np.inf
    later = numbers[:, None] < numbers
    entered = np.where(later[..., None], slopes, np.inf).min(0)
    entered[0] = 0
    queue = np.argsort(-entered.reshape(-1), kind="stable")[: np.count_nonzero(entered > 0)]
    if not len(queue):
        return
    slopes[~later] = -np.inf
    left = _running_max(slopes.transpose(1, 0, 2))  # [last that is allowed, from, heads]
    powers = 0.5 ** np.arange(POWERS)[:, None, None]
    most = 2.0 ** math.floor(math.log2(spendable)) if spendable else 0.0
    smallest = np.min(costs, where=costs > 0, initial=np.inf)
    while smallest <= most:
        allowed = costs <= most * powers
        taken = allowed & (entered > left[allowed.sum(1) - 1, :, heads].transpose(0, 2, 1))
        steps = np.where(taken, costs, 0)
        _running_max(steps.transpose(1, 0, 2))
        steps[:, 1:] -= steps[:, :-1].copy()
        spent = np.cumsum(steps.reshape(POWERS, -1)[:, queue], axis=1)
        fits = np.zeros((POWERS, costs.size), np.bool_)
        fits[:, queue] = spent <= spendable
        yield np.where(taken & fits.reshape(taken.shape), numbers[:, None], 0).max(1)
        if (spent[:, -1] <= spendable).any():
            return
        most *= 0.5**POWERS


def _running_max(values: Float64) -> Float64:
    """Raise each of `values[1:]`, in place, to the one before it where that is larger, in less time than
    `np.maximum.accumulate`."""
    for before, one in pairwise(values):
        np.maximum(before, one, out=one)
    return values


def _ranked(samples: Samples, rank: int) -> Float64:
    known = np.where(np.isnan(samples), np.inf, samples).astype(np.float64)
    ranked: Float64 = np.partition(known, rank - 1, axis=0)[rank - 1]
    return ranked


def _binomial(n: int, r: int, p: float) -> float:
    """The chance of exactly r hits in n draws of chance p."""
    ways = math.lgamma(n + 1) - math.lgamma(r + 1) - math.lgamma(n - r + 1)
    return math.exp(ways + r * math.log(p) + (n - r) * math.log1p(-p))


def _check(quantile: float, confidence: float) -> None:
    if not (0 < quantile < 1 and 0 < confidence < 1):
        raise ValueError(f"quantile is {quantile!r} and confidence is {confidence!r}; expected both between 0 and 1")


AUDITS_MIN = next(n for n in range(1, 1000) if rank_of_bound(n) is not None)
"""The smallest number of audits that can prove anything."""
