"""The rule for diffuse heads, which want a large share of all tokens, and the costs of the ways to answer them."""

import math
from dataclasses import dataclass

from indexes.retrieval import TopK
from query_optimizer.facts import Facts, IndexFacts, PartFacts
from query_optimizer.rule import Fired, Heads, Wish, cheapest, piecewise_cost

ESTIMATED = TopK(64)
"""What is retrieved exactly for heads that are estimated; retrieving more hardly lowers their error (benchmarks/README.md)."""


@dataclass(frozen=True)
class DiffuseHead:
    """Reads diffuse heads whole instead of searching: heads of which earlier queries wanted a large share of all tokens.

    Where it costs less, all heads are read whole, because a page holds the keys and values of all heads. If the caller asks for
    an estimate of the tail and names no retrieval, an index may instead read the few tokens with the largest weights and estimate
    the rest from pages (RetroInfer, arXiv 2505.02922: tripartite attention). The cheapest of these ways is taken.

    share_max: the largest share of the tokens that a head may want and still be searched. free_share_max, free_tokens_max: the
    same where an estimate is possible. queries_min: a head is known after this number of queries. wish: the kind of index to wish
    for where an estimate is asked for and no index can make one.
    """

    share_max: float = 0.04
    free_share_max: float = 0.01
    free_tokens_max: float = 1024.0
    queries_min: float = 2.0
    wish: str = "coarse-clusters"
    name: str = "diffuse_head"

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str:
        if not part.heads:
            return "nothing is known of its heads yet"
        if facts.hints.index is not None or not part.searchable:
            return "an index was asked for" if part.searchable else "nothing of it is searched"
        may_estimate = facts.estimate_tail and facts.retrieval is None and not facts.bounded
        tail = min(filter(_estimates, facts.usable(part)), key=_tail_seconds, default=None) if may_estimate else None
        read = self._diffuse(part, heads, self.share_max * part.searchable)
        most = min(self.free_share_max * part.searchable, self.free_tokens_max)
        estimated = () if tail is None else self._diffuse(part, heads, most)
        if not read and not estimated:
            return "no head is known to want much"
        in_part, whole = _seconds_in_part(facts, part, heads, read), part.seconds - part.window_seconds
        if tail is not None and _seconds_estimated(facts, part, heads, estimated, tail) < min(in_part, whole):
            return Fired(tail.kind, estimated, ESTIMATED, estimate_tail=True, reason=_reason(part, estimated))
        if not read:
            return "no head is known to want so much that another way takes less"
        wish = self.wish if may_estimate and not any(map(_estimates, part.indexes)) else None
        return Fired(heads=read if in_part < whole else heads, wish=wish, reason=_reason(part, read))

    def _diffuse(self, part: PartFacts, heads: Heads, most: float) -> Heads:
        """Those of the heads whose queries are known to want more than `most` tokens, or to make searches give up."""
        known = (head for head in heads if part.heads[head].queries >= self.queries_min)
        return tuple(head for head in known if part.heads[head].dense_share >= 0.5 or part.heads[head].retrieved_tokens > most)


def _reason(part: PartFacts, heads: Heads) -> str:
    most = max(part.heads[head].retrieved_tokens for head in heads) / part.searchable
    return f"queries of {len(heads)} KV heads want up to {most:.0%} of the tokens"


def _seconds_in_part(facts: Facts, part: PartFacts, heads: Heads, read: Heads) -> float:
    """Seconds of reading everything for the heads `read` and searching for the others."""
    return (part.seconds - part.window_seconds) * piecewise_cost(len(read) / facts.kv_heads) + _others(facts, part, heads, read)


def _seconds_estimated(facts: Facts, part: PartFacts, heads: Heads, estimated: Heads, tail: IndexFacts) -> float:
    """Seconds of estimating the heads `estimated` and searching for the others."""
    return _tail_seconds(tail) * len(estimated) / facts.kv_heads + _others(facts, part, heads, estimated)


def _others(facts: Facts, part: PartFacts, heads: Heads, apart: Heads) -> float:
    """Seconds of this part's share of a step, and of searching for all heads but those `apart`."""
    step, left = facts.step_seconds * part.visible / facts.tokens, len(heads) - len(apart)
    search = cheapest(facts.usable(part))
    if not left:
        return step
    return math.inf if search is None else step + search.seconds * left / facts.kv_heads


def _estimates(index: IndexFacts) -> bool:
    return index.estimates_tail


def _tail_seconds(index: IndexFacts) -> float:
    return math.inf if index.tail_seconds is None else index.tail_seconds
