"""The text of EXPLAIN about the evidence by which KV heads are answered."""

from math import inf, isfinite

from query_optimizer.access import Refusal
from query_optimizer.order_statistics import AUDITS_MIN
from query_optimizer.rule import Heads
from query_optimizer.ways import LayerBudget, Way, WayFacts


def evidence(budget: LayerBudget, way: Way, heads: Heads) -> str:
    """Why these heads are answered by a way that is proven: the evidence of the head with the largest error."""
    worst = max((budget.heads[head] for head in heads), key=lambda share: share.bound)
    up_to = "up to " if len(heads) > 1 else ""
    return f"{way.kind}: {up_to}{worst.bound:.2%} at p95 of {worst.audits} audits, budget {budget.error_max:.2%}"


def no_proof(budget: LayerBudget, heads: Heads) -> str:
    """Why these heads are read whole: what is known of the way that is nearest to a proof."""
    if budget.error_max <= 0:
        return "no error is allowed"
    if not budget.ways:
        return f"there is no index whose answers could be audited, budget {budget.error_max:.2%}"
    nearest = min(budget.ways, key=lambda facts: min(_of_head(facts, head) for head in heads))
    told = known(budget, nearest, heads)
    return f"no faster way is proven to keep its share of {budget.error_max:.2%}; nearest: {nearest.way}, {told}"


def passed_over(budget: LayerBudget, way: Way | None, heads: Heads) -> tuple[Refusal, ...]:
    """The faster ways that these heads are not answered by, and why; all ways where they are read whole. way: None for that."""
    if budget.trial is not None:
        return ()
    tried = [facts.way for facts in budget.ways]
    faster = budget.ways if way is None else budget.ways[: tried.index(way)]
    return tuple(Refusal(str(facts.way), known(budget, facts, heads)) for facts in faster)


def known(budget: LayerBudget, facts: WayFacts, heads: Heads) -> str:
    """What is known of a way, for the one of these heads that is nearest to a proof."""
    best = min(heads, key=lambda head: _of_head(facts, head))
    audits = facts.audits[best]
    if facts.waits[best]:
        return "withdrawn, and not tried for now"
    if isfinite(facts.bounds[best]):
        timed = facts.time_share is not None and facts.bounds[best] <= budget.error_max
        time = f", in {(facts.time_share or 0) + facts.given_up[best]:.0%} of the exact time" if timed else ""
        return f"{facts.bounds[best]:.2%} at p95 of {audits} audits{time}"
    if facts.least[best] > budget.error_max:
        return f"over {facts.least[best]:.2%} at p95 of {audits} audits"
    return f"{audits} of {AUDITS_MIN} audits"


def _of_head(facts: WayFacts, head: int) -> tuple[float, float]:
    """A key that is smaller the nearer a head is to a proof: its bound, then its number of audits."""
    return (inf if facts.waits[head] else facts.bounds[head], -facts.audits[head])
