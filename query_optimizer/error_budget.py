"""The error budget of a layer: a head is answered approximately only in ways that were proven on that very head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt

import numpy as np
import numpy.typing as npt

from query_optimizer.evidence_text import evidence, no_proof, passed_over
from query_optimizer.facts import Facts, PartFacts
from query_optimizer.order_statistics import joint_bound, share_out
from query_optimizer.rule import Fired, Heads, Wish, piecewise_cost
from query_optimizer.ways import HeadShare, LayerBudget, Way, WayFacts

TIME_SHARE_MAX = 0.9
"""Heads are read whole where searching would take a larger share of the time."""
TIME_SHARE_GUESS = 0.5
"""The share of the time that a way is assumed to take before it was timed."""
AUDITS_MAX = 181
"""A way that is not proven after this many audits is no longer tried; the fifth largest error is the bound then."""
SLOW_AUDITS = 8
"""After this many audits, a way that is not faster than reading everything is no longer tried."""


Rows = Mapping[Way, npt.NDArray[np.float32]]
"""For each way the errors of the KV heads in audits of all of them, `[n, kv_heads]`, a row for each query; NaN is unknown."""


def share_budget(error_max: float, ways: Sequence[WayFacts], kv_heads: int, rows: Sequence[Rows] = ()) -> tuple[HeadShare, ...]:
    """The way of each head: of each single way for some heads, and of all ways together, what takes the least time.

    The squares of the proven bounds of single heads sum to at most error_max squared, and what the heads in use err together in
    one query is proven to keep it too, by the rows of each part. Exact for all heads where searching for some takes as long.
    """
    proven = [facts for facts in ways if any(map(isfinite, facts.bounds))]
    choices = [_choice(error_max, [facts], kv_heads, rows) for facts in proven]
    if len(proven) > 1:
        choices.append(_choice(error_max, proven, kv_heads, rows))
    seconds, heads = min(choices, key=lambda choice: choice[0], default=(inf, ()))
    return heads if seconds <= TIME_SHARE_MAX else (HeadShare(),) * kv_heads


def _choice(
    error_max: float, ways: Sequence[WayFacts], kv_heads: int, rows: Sequence[Rows]
) -> tuple[float, tuple[HeadShare, ...]]:
    """How these ways share the budget, and the time that takes, relative to reading everything."""
    times = [[1.0, *(head_time(facts, head) for facts in ways)] for head in range(kv_heads)]
    bounds = [[0.0, *(inf if facts.waits[head] else facts.bounds[head] for facts in ways)] for head in range(kv_heads)]
    chosen = share_out(error_max, [list(zip(times[head], bounds[head], strict=True)) for head in range(kv_heads)]).tolist()
    for one in rows:
        _keep_together(error_max, ways, chosen, one)
    searched = [head for head in range(kv_heads) if chosen[head]]
    if not searched:
        return inf, ()
    seconds = sum(times[head][chosen[head]] for head in searched) / kv_heads + piecewise_cost(1 - len(searched) / kv_heads)
    left = (error_max**2 - sum(bounds[head][chosen[head]] ** 2 for head in searched)) / len(searched)

    def share(head: int) -> HeadShare:
        if not chosen[head]:
            return HeadShare()
        facts, bound = ways[chosen[head] - 1], bounds[head][chosen[head]]
        return HeadShare(facts.way, bound, sqrt(bound**2 + max(left, 0.0)), facts.audits[head])

    return seconds, tuple(map(share, range(kv_heads)))


def _keep_together(error_max: float, ways: Sequence[WayFacts], chosen: list[int], rows: Rows) -> None:
    """Read heads whole, one after the other, until the others are proven to keep the budget together: each time the head that
    errs most in the queries that break it. Heads may err rarely, and each in other queries."""
    while any(chosen):
        groups = []
        for number, facts in enumerate(ways, 1):
            heads = [head for head, choice in enumerate(chosen) if choice == number]
            if heads:
                known = rows.get(facts.way, np.zeros((0, len(chosen)), np.float32))[:, heads]
                groups.append((heads, known[~np.isnan(known).any(axis=1)]))
        if joint_bound([known for _, known in groups]) <= error_max:
            return
        worst = max((_at_fault(heads, known, error_max) for heads, known in groups), key=lambda fault: fault[0])
        chosen[worst[1]] = 0


def _at_fault(heads: Sequence[int], known: npt.NDArray[np.float32], error_max: float) -> tuple[float, int]:
    """The head with the largest squared errors in rows that break the budget, and how large they are."""
    squares = known.astype(np.float64) ** 2
    over = squares[squares.sum(axis=1) > error_max**2]
    faults = over.sum(axis=0) if len(over) else squares.sum(axis=0)
    return float(faults.max(initial=0.0)), heads[int(faults.argmax())]


def head_time(facts: WayFacts, head: int) -> float:
    """The time of answering a head, relative to reading it whole; a head that a search gives up on is read whole behind it."""
    return (TIME_SHARE_GUESS if facts.time_share is None else facts.time_share) + facts.given_up[head]


def trial_of(budget: LayerBudget) -> tuple[WayFacts, Heads] | None:
    """The way that is to be tried next, and the KV heads that it may come to answer; None where nothing is to be learnt.

    First ways for the heads that are read whole, in their order; then, for heads that a way answers already, those before it, for
    an index may have come later.
    """
    read_whole = tuple(head for head, share in enumerate(budget.heads) if share.way is None)
    for facts in budget.ways:
        if any(is_open(budget, facts, head) for head in read_whole):
            return facts, read_whole
    places = {facts.way: place for place, facts in enumerate(budget.ways)}
    served = [(places[share.way], head) for head, share in enumerate(budget.heads) if share.way in places]
    for place, facts in enumerate(budget.ways):
        before = [(budget.ways[now], head) for now, head in served if place < now]
        heads = tuple(head for now, head in before if is_open(budget, facts, head, head_time(now, head)))
        if heads:
            return facts, heads
    return None


def is_open(budget: LayerBudget, facts: WayFacts, head: int, time_max: float = TIME_SHARE_MAX) -> bool:
    """Whether more audits of a way may prove it for a head: it does not wait, and is not known to miss the budget, or to take a
    larger share of the time than time_max."""
    tried = facts.audits[head] >= (AUDITS_MAX if head_time(facts, head) <= time_max else SLOW_AUDITS)
    return not tried and not facts.waits[head] and facts.least[head] <= budget.error_max


@dataclass(frozen=True)
class ErrorBudget:
    """A query that names nothing is answered by what audits proved: each KV head by the fastest ways that together keep the
    budget of the layer, and exactly where none is proven.

    wishes: the kinds of index to wish for, one after the other, as long as heads are read whole.
    """

    wishes: tuple[str, ...] = ("flat", "quantized", "coarse-clusters")
    name: str = "error_budget"

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str | tuple[Fired, ...]:
        budget = facts.budget
        if budget is None:
            return "the query says itself what it reads"
        if not part.searchable:
            return "nothing of it is searched"
        kinds = {index.kind for index in facts.affordable(part)}
        groups: dict[Way | None, Heads] = {}
        for head in heads:
            way = budget.way_of(head)
            way = way if way is not None and way.kind in kinds else None
            groups[way] = (*groups.get(way, ()), head)
        if facts.in_fast_memory(part) and len(groups) > 1:  # the device answers all heads alike
            groups = {None: heads}
        kept_in = facts.kept_in(part)
        return tuple(replace(self._fired(facts, part, budget, way, group), kept_in=kept_in) for way, group in groups.items())

    def _fired(self, facts: Facts, part: PartFacts, budget: LayerBudget, way: Way | None, heads: Heads) -> Fired:
        if way is None:
            wish, reason = self._wish(facts, part, budget, heads), no_proof(budget, heads)
            return Fired(heads=heads, wish=wish, reason=reason, refusals=passed_over(budget, None, heads))
        if budget.trial is not None:
            return Fired(way.kind, heads, way.retrieval, way.estimate_tail, reason="tried in the shadow of an exact answer")
        told, refusals = evidence(budget, way, heads), passed_over(budget, way, heads)
        return Fired(way.kind, heads, way.retrieval, way.estimate_tail, reason=told, refusals=refusals)

    def _wish(self, facts: Facts, part: PartFacts, budget: LayerBudget, heads: Heads) -> str | None:
        """The first kind that the part lacks, once the ways of those before it cannot be proven for the heads that are read
        whole. None in fast memory, whose kinds come with the copies there."""
        if budget.error_max <= 0 or facts.hints.index is not None:
            return facts.hints.index if budget.error_max > 0 else None
        if facts.in_fast_memory(part):
            return None
        standing = {index.kind for index in part.indexes}
        for kind in self.wishes:
            if kind not in standing:
                return kind
            tried = [known for known in budget.ways if known.way.kind == kind]
            if any(is_open(budget, known, head) for known in tried for head in heads):
                return None
        return None
