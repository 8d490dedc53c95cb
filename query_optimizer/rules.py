"""The rules, in their order: the first that fires wins.

A rule is an object with a name and `when(facts)`, which returns a `Fired` or, as a string, the reason why it did not fire.
"""

from dataclasses import dataclass
from typing import Protocol

from indexes.retrieval import Exact, Retrieval
from query_optimizer.facts import Facts


@dataclass(frozen=True)
class Fired:
    """What a rule decided, and the context lengths [tokens_min, tokens_end) for which it would decide the same."""

    retrieval: Retrieval
    tokens_min: int = 0
    tokens_end: int | None = None


class Rule(Protocol):
    """One reason for one access path."""

    @property
    def name(self) -> str: ...

    def when(self, facts: Facts) -> Fired | str: ...


@dataclass(frozen=True)
class Asked:
    """The caller named the retrieval; it is the oracle behind the same call."""

    name: str = "asked"

    def when(self, facts: Facts) -> Fired | str:
        return "the query names no retrieval" if facts.retrieval is None else Fired(facts.retrieval)


@dataclass(frozen=True)
class ShortContext:
    """A short context is read whole: finding its few important tokens costs more than reading all (AlayaDB, section 6)."""

    tokens_max: int
    name: str = "short_context"

    def when(self, facts: Facts) -> Fired | str:
        if facts.tokens > self.tokens_max:
            return f"{facts.tokens:,} tokens are more than {self.tokens_max:,}"
        return Fired(Exact(), tokens_end=self.tokens_max + 1)


@dataclass(frozen=True)
class NoIndex:
    """Without an index on any part, every token is read."""

    name: str = "no_index"

    def when(self, facts: Facts) -> Fired | str:
        indexed = [part.name for part in facts.parts if part.indexes]
        return f"{', '.join(indexed)} can be searched" if indexed else Fired(Exact())
