"""The rules, in their order: the first that fires wins.

A rule is an object with a name and `when(facts)`, which returns a `Fired` or, as a string, the reason why it did not fire.
"""

from dataclasses import dataclass
from typing import Protocol

from indexes.retrieval import Dipr, Exact, Retrieval
from query_optimizer.facts import Facts


@dataclass(frozen=True)
class Fired:
    """What a rule decided, and the context lengths [tokens_min, tokens_end) for which it would decide the same."""

    retrieval: Retrieval
    tokens_min: int = 0
    tokens_end: int | None = None


DEFAULT = Dipr()


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
class Indexed:
    """What can be searched is: a range of the largest weights decides how many tokens a head needs (AlayaDB, definition 2)."""

    retrieval: Retrieval = DEFAULT
    name: str = "indexed"

    def when(self, facts: Facts) -> Fired | str:
        searchable = any(part.indexes and part.searchable for part in facts.parts)
        return Fired(self.retrieval) if searchable else "no part has an index"


@dataclass(frozen=True)
class NoIndex:
    """Where nothing can be searched, or searching is switched off, every token is read."""

    name: str = "no_index"

    def when(self, facts: Facts) -> Fired | str:  # noqa: ARG002  # a rule's shape; the last one always fires
        return Fired(Exact())
