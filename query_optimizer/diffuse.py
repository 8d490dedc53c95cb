"""Heads that look at everything: the rule for them, and what the ways of answering them take."""

import math
from dataclasses import dataclass

from indexes.retrieval import TopK
from query_optimizer.facts import Facts, IndexFacts, PartFacts
from query_optimizer.rule import Fired, Heads, Wish, cheapest, strided

ESTIMATED = TopK(64)
"""What is retrieved of heads that are estimated: their error hardly falls with more (benchmarks/README.md)."""


@dataclass(frozen=True)
class DiffuseHead:
    """Heads that want a large share of all tokens are not searched for them; which do is known from earlier queries.

    What takes least decides. Where the caller left the retrieval open and an index estimates what it does not retrieve, the few
    largest weights are read and the rest is estimated from pages (RetroInfer, arXiv 2505.02922: tripartite attention). Otherwise
    these heads are read whole, or all are, for a page holds the tokens of all heads. share_max: of the tokens, which a head that
    is searched wants at most; free_share_max, free_tokens_max: where the retrieval is open.
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
        free = facts.retrieval is None and not facts.bounded
        tail = min(filter(_estimates, facts.usable(part)), key=_tail_seconds, default=None) if free else None
        read = self._wanting(part, heads, self.share_max * part.searchable)
        most = min(self.free_share_max * part.searchable, self.free_tokens_max)
        estimated = () if tail is None else self._wanting(part, heads, most)
        if not read and not estimated:
            return "no head is known to want much"
        in_part, whole = _seconds_in_part(facts, part, heads, read), part.seconds - part.window_seconds
        if tail is not None and _seconds_estimated(facts, part, heads, estimated, tail) < min(in_part, whole):
            return Fired(tail.kind, estimated, ESTIMATED, estimate_tail=True, reason=_wanted(part, estimated))
        if not read:
            return "no head is known to want so much that another way takes less"
        wish = self.wish if free and not any(map(_estimates, part.indexes)) else None
        return Fired(heads=read if in_part < whole else heads, wish=wish, reason=_wanted(part, read))

    def _wanting(self, part: PartFacts, heads: Heads, most: float) -> Heads:
        known = (head for head in heads if part.heads[head].queries >= self.queries_min)
        return tuple(head for head in known if part.heads[head].dense >= 0.5 or part.heads[head].retrieved > most)


def _wanted(part: PartFacts, heads: Heads) -> str:
    most = max(part.heads[head].retrieved for head in heads) / part.searchable
    return f"queries of {len(heads)} KV heads want up to {most:.0%} of the tokens"


def _seconds_in_part(facts: Facts, part: PartFacts, heads: Heads, read: Heads) -> float:
    """Of reading some of the heads whole and searching the others."""
    return (part.seconds - part.window_seconds) * strided(len(read) / facts.kv_heads) + _others(facts, part, heads, read)


def _seconds_estimated(facts: Facts, part: PartFacts, heads: Heads, estimated: Heads, tail: IndexFacts) -> float:
    """Of estimating some of the heads and searching the others."""
    return _tail_seconds(tail) * len(estimated) / facts.kv_heads + _others(facts, part, heads, estimated)


def _others(facts: Facts, part: PartFacts, heads: Heads, apart: Heads) -> float:
    """Of a step, as far as this part has a share in it, and of searching all heads but some."""
    step, left = facts.step_seconds * part.visible / facts.tokens, len(heads) - len(apart)
    search = cheapest(facts.usable(part))
    if not left:
        return step
    return math.inf if search is None else step + search.seconds * left / facts.kv_heads


def _estimates(index: IndexFacts) -> bool:
    return index.estimates_tail


def _tail_seconds(index: IndexFacts) -> float:
    return math.inf if index.tail_seconds is None else index.tail_seconds
