"""The protocol of rules and their verdicts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from indexes.retrieval import Dipr, Retrieval
from query_optimizer.access import Refusal
from query_optimizer.facts import Facts, IndexFacts, PartFacts

Heads = tuple[int, ...]
DEFAULT = Dipr()
"""The retrieval where the caller names none: a range lets each head decide how many tokens it needs."""


@dataclass(frozen=True, slots=True)
class Fired:
    """The verdict of a rule that decides on a part.

    index: the kind to search, None to read everything. heads: the KV heads it decides on, None for all that are left. retrieval:
    the retrieval to use where the caller named none, None for the default. kept_in: the tier to keep the part's pages in. wish: a
    kind of index that would be better if it were built. reason: why the rule fired, for EXPLAIN. refusals: what the rule itself
    tried before. tokens_end: the rule fires alike for every context of fewer tokens, whatever else becomes of it; 0 where this
    cannot be said.
    """

    index: str | None = None
    heads: Heads | None = None
    retrieval: Retrieval | None = None
    estimate_tail: bool = False
    kept_in: str | None = None
    wish: str | None = None
    reason: str = ""
    refusals: tuple[Refusal, ...] = ()
    tokens_end: int = 0


@dataclass(frozen=True, slots=True)
class Wish:
    """The verdict of a rule that would fire if the part had an index of that kind."""

    kind: str
    reason: str


class Rule(Protocol):
    """One reason to choose an access path. `when` returns a Fired, or several for different heads; a Wish; or a string that says
    why the rule did not fire."""

    @property
    def name(self) -> str: ...

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | tuple[Fired, ...] | Wish | str: ...


def cheapest(indexes: Iterable[IndexFacts]) -> IndexFacts | None:
    """The index whose search takes the least time; None if there is no index."""
    return min(indexes, key=lambda index: index.seconds, default=None)


PIECES_COST = 1.3
"""Cost of reading pieces of pages, relative to reading the same number of bytes in a row; measured on two of four heads
(benchmarks/README.md)."""


def piecewise_cost(share: float) -> float:
    """Cost of reading the tokens for this share of the KV heads, relative to reading them for all heads. Some heads are read as
    pieces of pages, which is slower than reading everything in the order in which it lies."""
    return min(1.0, PIECES_COST * share)
