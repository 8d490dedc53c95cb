"""What a rule is, and what it answers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from indexes.retrieval import Dipr, Retrieval
from query_optimizer.facts import Facts, IndexFacts, PartFacts

Heads = tuple[int, ...]
DEFAULT = Dipr()
"""What is retrieved where the caller names nothing: a range lets each head decide how many tokens it needs."""


@dataclass(frozen=True, slots=True)
class Fired:
    """What a rule decided. index: the kind to search, None to read everything. heads: None for all that are left.

    retrieval: in place of the one asked for, only where the caller named none. kept_in: the tier to keep the part's pages in.
    wish: a kind of index with which there would be a better way. reason: why it fired, for EXPLAIN.
    """

    index: str | None = None
    heads: Heads | None = None
    retrieval: Retrieval | None = None
    estimate_tail: bool = False
    kept_in: str | None = None
    wish: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Wish:
    """A rule that would have fired, had the part an index of that kind."""

    kind: str
    reason: str


class Rule(Protocol):
    """One reason for one access path."""

    @property
    def name(self) -> str: ...

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | Wish | str: ...


def cheapest(indexes: Iterable[IndexFacts]) -> IndexFacts | None:
    """The index that takes least time, None of none."""
    return min(indexes, key=lambda index: index.seconds, default=None)


PIECES = 1.3
"""Times as long as its share takes what is read by pieces of a page; measured on half of four heads (benchmarks/README.md)."""


def strided(share: float) -> float:
    """What reading the tokens of this share of the KV heads takes, of what all take: it goes by pieces of a page, which is slower
    than reading all in the order in which it lies."""
    return min(1.0, PIECES * share)
