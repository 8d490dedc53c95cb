"""The error budget of a layer: a head is answered approximately only in ways that were proven on that very head."""

from dataclasses import dataclass, replace

from query_optimizer.evidence_text import evidence, no_proof, passed_over
from query_optimizer.facts import Facts, PartFacts
from query_optimizer.head_shares import TIME_SHARE_MAX, head_time
from query_optimizer.order_statistics import AUDITS_MIN
from query_optimizer.rule import Fired, Heads, Wish
from query_optimizer.ways import LayerBudget, Way, WayFacts

AUDITS_MAX = 181
"""A way that is not proven after this many audits is no longer tried; the fifth largest error is the bound then."""
SLOW_AUDITS = 8
"""After this many audits, a way that is not faster than reading everything is no longer tried."""


def trial_of(budget: LayerBudget) -> tuple[WayFacts, Heads] | None:
    """The way to try next, and the KV heads that it may answer afterwards; None if nothing is left to learn.

    Ways are tried in their order, first for the heads that are read whole; those that were audited enough to be proven, and were
    not, come last. Then each head that a way answers already is tried with the ways before that one, because their index may have
    been built later."""
    read_whole = tuple(head for head, share in enumerate(budget.heads) if share.way is None)
    for most in (AUDITS_MIN, AUDITS_MAX):
        for facts in budget.ways:
            if any(is_open(budget, facts, head) and facts.audits[head] < most for head in read_whole):
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
        """The first kind that the part lacks, once the ways of those before it were not proven by audits enough for the heads
        that are read whole. None in fast memory, whose kinds come with the copies there."""
        if budget.error_max <= 0 or facts.hints.index is not None:
            return facts.hints.index if budget.error_max > 0 else None
        if facts.in_fast_memory(part):
            return None
        standing = {index.kind for index in part.indexes}
        for kind in self.wishes:
            if kind not in standing:
                return kind
            tried = [known for known in budget.ways if known.way.kind == kind]
            if any(is_open(budget, known, head) and known.audits[head] < AUDITS_MIN for known in tried for head in heads):
                return None
        return None
