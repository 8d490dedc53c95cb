"""The rules, in their order. Each part is taken through them; the first that fires decides, for the KV heads it names.

A rule is an object with a name and `when(facts, part, heads)`, which returns a `Fired`, a `Wish` for an index that is not
there, or the reason why it did not fire, as a string. `heads` are the KV heads that no rule before it has decided on.
"""

import sys
from dataclasses import dataclass
from math import isfinite

from indexes.retrieval import Exact, TopK
from query_optimizer.diffuse import DiffuseHead
from query_optimizer.error_budget import ErrorBudget
from query_optimizer.facts import Facts, IndexFacts, PartFacts
from query_optimizer.rule import Fired, Heads, Rule, Wish, cheapest


@dataclass(frozen=True)
class ExactAsked:
    """The caller asked for exact attention."""

    name: str = "exact_asked"

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str:
        if isinstance(facts.retrieval, Exact):
            return Fired(reason="exact attention was asked for", tokens_end=sys.maxsize)
        return "exact attention was not asked for"


@dataclass(frozen=True)
class ShortContext:
    """A short context is read whole: finding its few important tokens costs more (AlayaDB, arXiv 2504.10326, section 6).

    A context is short if it has at most `tokens_max` tokens, or if reading it takes no longer than the fastest search, by the
    costs of this machine. An index that the caller names is searched all the same.
    """

    tokens_max: int
    name: str = "short_context"

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str:
        if facts.hints.index is not None:
            return "an index was asked for"
        if facts.tokens <= self.tokens_max:
            return Fired(reason=f"{facts.tokens:,} tokens, at most {self.tokens_max:,}", tokens_end=self.tokens_max + 1)
        if not any(facts.usable(part) for part in facts.parts):
            return f"{facts.tokens:,} tokens are more than {self.tokens_max:,}"
        read, search = facts.read_seconds, searching(facts)
        told = f"{facts.tokens:,} tokens take {1e3 * read:.2f} ms to read and from {1e3 * search:.2f} ms to search"
        return Fired(reason=told) if search >= read else told


@dataclass(frozen=True)
class FreshTail:
    """A session's own tokens are read whole: they are recent, and no index holds them yet (InfLLM, arXiv 2402.04617: the local
    window).

    A call of more than `queries_max` tokens is a piece of a prompt. It reads the indexed tokens whole as well, because a prompt
    attends to itself exactly.
    """

    queries_max: int = 16
    name: str = "fresh_tail"

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str:
        if not part.is_tail:
            return "not the session's own tokens"
        if not part.searchable:
            return Fired(reason="the session's own tokens")
        if facts.new_tokens > self.queries_max:
            return Fired(reason=f"the {facts.new_tokens} queries are a piece of a prompt")
        return f"{part.searchable:,} of its tokens are indexed"


@dataclass(frozen=True)
class Hinted:
    """The caller named a kind of index."""

    name: str = "hinted"

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str:
        kind = facts.hints.index
        if kind is None:
            return "no index was asked for"
        if kind in [index.kind for index in facts.affordable(part)]:
            return Fired(kind, reason=f"{kind} was asked for")
        if kind in [index.kind for index in part.indexes]:
            return f"{kind} keeps more than the memory budget of {facts.hints.memory_budget:,} bytes"
        return Wish(kind, _missing(part, kind)) if part.searchable else "too short for an index"


@dataclass(frozen=True)
class PartialReuse:
    """Filters out hidden tokens where only some of a part are visible (AlayaDB, section 7.1: partial reuse).

    A scan begins and ends where it is told, so hidden tokens cost it nothing; a walk leads through them. Below a share of
    `share_min` visible tokens the cheapest scan is taken.
    """

    share_min: float = 0.5
    name: str = "partial_reuse"

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str:
        told = f"{part.visible:,} of {part.stored:,} tokens are visible"
        if part.visible >= self.share_min * part.stored:
            return told
        scan = cheapest(index for index in facts.usable(part) if not index.walks)
        return Fired(scan.kind, reason=told) if scan is not None else "no index of it can be scanned"


@dataclass(frozen=True)
class BudgetFits:
    """A part whose pages fit into faster memory is kept there, and a few of its coarse pages are picked (InfLLM, arXiv
    2402.04617; AlayaDB, section 6: a sufficient budget of GPU memory).

    The rule decides for queries that say what they read. Picking pages by rank is an approximation, so for a query with an error
    budget `error_budget` decides, which stands before this rule and goes by audits. It keeps pages in faster memory too.
    """

    tokens_share: float = 0.02
    name: str = "budget_fits"

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str:
        fast = facts.fast
        if fast is None:
            return f"no memory is faster than {part.tier}"
        resident = facts.in_fast_memory(part)
        needed = part.visible * facts.token_nbytes
        if not facts.fits_fast_memory(part):
            return f"its pages take {needed:,} bytes, and {fast.free_nbytes:,} are free in {fast.tier}"
        usable = facts.usable(part) if facts.estimate_tail else facts.affordable(part)
        ranked = not facts.bounded  # a bound is met by ranges, ever wider
        coarse = cheapest(index for index in usable if index.kind.startswith("coarse") and (ranked or not index.ranks_only))
        if coarse is None:
            return (
                f"no index of its pages in {fast.tier} can answer this"
                if resident
                else Wish("coarse-clusters", _missing(part, "coarse"))
            )
        k = max(1, round(self.tokens_share * part.visible))
        told = f"its pages take {needed:,} of {fast.free_nbytes:,} bytes that are free in {fast.tier}"
        if resident:
            told = f"its pages lie in {fast.tier}"
        elif isfinite(fast.transfer_bytes_s):
            told += f", and {1e3 * needed / fast.transfer_bytes_s:.2f} ms to bring in"
        return Fired(coarse.kind, retrieval=None if facts.bounded else TopK(k), kept_in=facts.kept_in(part), reason=told)


@dataclass(frozen=True)
class FirstLayers:
    """The first layers are scanned, because they attend to many tokens and a scan finds all in one pass (AlayaDB, section 6:
    layer 0 on flat).

    Once their queries are known, the costs decide as in all other layers.
    """

    layers: int = 1
    name: str = "first_layers"

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str:
        if facts.layer >= self.layers:
            return f"layer {facts.layer} is none of the first {self.layers}" if self.layers != 1 else "not the first layer"
        if part.heads:
            return "its queries are known"
        scan = cheapest(index for index in facts.usable(part) if not index.walks)
        told = f"layer {facts.layer}, of whose queries nothing is known yet"
        return Fired(scan.kind, reason=told) if scan is not None else "no index of it can be scanned"


@dataclass(frozen=True)
class DeepLayers:
    """Deeper layers walk a graph, because they attend to few tokens and a graph leads to these without a look at the others
    (AlayaDB, section 6).

    The rule fires where a walk costs less than a scan on this machine. tokens_min: from so many tokens on a graph is wished for.
    """

    tokens_min: int = 1 << 18
    kind: str = "hnsw"
    name: str = "deep_layers"

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str:
        usable = facts.usable(part)
        graph = cheapest(index for index in usable if index.walks)
        scan = cheapest(index for index in usable if not index.walks)
        if graph is None:
            missing = _missing(part, self.kind)
            wished = part.searchable >= self.tokens_min and not facts.in_fast_memory(part)
            wished = wished and not any(index.walks for index in part.indexes)
            return Wish(self.kind, missing) if wished else missing
        told = _compared(usable)
        return Fired(graph.kind, reason=told) if scan is None or graph.seconds <= scan.seconds else told


@dataclass(frozen=True)
class CheapestScan:
    """Takes the index with the cheapest scan, where there is no graph or walking it costs more.

    wish: the kind of index to wish for where there is none, "" for no wish.
    """

    wish: str = "flat"
    name: str = "cheapest_scan"

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str:
        usable = facts.usable(part)
        scan = cheapest(index for index in usable if not index.walks)
        if scan is not None:
            return Fired(scan.kind, reason=_compared(usable))
        missing = _missing(part, self.wish or "index")
        return Wish(self.wish, missing) if self.wish and part.searchable and not part.indexes else missing


@dataclass(frozen=True)
class NoIndex:
    """Reads every token, because nothing can be searched or searching is switched off."""

    name: str = "no_index"

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str:
        return Fired(reason="nothing that can be searched is left")


def base_rules(short_context_tokens: int = 4096, wish: str = "flat") -> tuple[Rule, ...]:
    """The rules in their order. wish: the kind of index that is built first, "" for none."""
    return (
        ExactAsked(),
        ShortContext(short_context_tokens),
        FreshTail(),
        ErrorBudget(tuple(dict.fromkeys((wish, "quantized", "coarse-clusters"))) if wish else ()),
        Hinted(),
        BudgetFits(),
        DiffuseHead(),
        PartialReuse(),
        FirstLayers(),
        DeepLayers(),
        CheapestScan(wish),
        NoIndex(),
    )


def searching(facts: Facts) -> float:
    """Seconds of the fastest search, by the cheapest index of each part; parts without an index are read whole."""
    total = facts.step_seconds
    for part in facts.parts:
        index = min((index.sharp_seconds for index in facts.usable(part)), default=part.seconds - part.window_seconds)
        total += part.window_seconds + index
    return total


def _compared(indexes: tuple[IndexFacts, ...]) -> str:
    """The seconds that searches take, the quickest first, as text."""
    return ", ".join(f"{i.kind} {1e3 * i.seconds:.2f} ms" for i in sorted(indexes, key=lambda i: i.seconds))


def _missing(part: PartFacts, kind: str) -> str:
    if any(name.startswith(kind) or kind == "index" for name in part.building):
        return f"no {kind} yet, it is being built"
    return f"no {kind} over it"
