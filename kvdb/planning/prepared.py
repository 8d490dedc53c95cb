"""A plan that is ready to be carried out, as often as its facts stay as they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvdb.attention.partition import RunPartition
from kvdb.catalog.evidence.evidence import Evidence
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.tail import NAME
from kvdb.planning.parts import Part
from query_optimizer.access import WINDOW
from query_optimizer.diffuse import DiffuseHead
from query_optimizer.error_budget import ErrorBudget
from query_optimizer.plan import Plan
from query_optimizer.rules import FreshTail
from query_optimizer.ways import LayerBudget, Way

Versions = tuple[int, ...]
"""The versions of everything that a plan depends on beside the context's length."""


@dataclass(frozen=True)
class Variant:
    """What an audit changes of the plan that queries are served by. trial: a way that answers all heads, proven or not. whole: KV
    heads that are read whole, however they are answered otherwise."""

    trial: Way | None = None
    whole: tuple[int, ...] = ()


SERVED = Variant()
"""The plan that queries are served by."""


@dataclass(slots=True, eq=False)
class Prepared:
    """A plan, how it divides the run, and what it was made for.

    parts: by name. version: what the plan was made for. uses_left: how many more queries it is good for. indexes_tail: whether
    old tokens of the tail are to be indexed, because they are searched or could be. knows_diffuse: whether heads are not searched
    by range because earlier queries showed that they are diffuse. rechecks: whether such heads are searched all the same, to see
    if they still are. budget: the error that the answer may have, None where the query says itself what it reads. evidence: of
    each part that may be searched. searches: whether any part is searched. searched_heads: the KV heads that the budget lets be
    searched. learns: whether its answers are now and then compared with others, which may prove or withdraw a way. ways: the
    names of the ways in which KV heads are answered. wishes: the indexes that it lacks, where it is to be seen first whether they
    would pay; `Planner.suggest` takes them.
    """

    plan: Plan
    parts: Mapping[str, Part]
    partition: RunPartition
    version: Versions
    uses_left: int
    rechecks: bool = False
    budget: LayerBudget | None = None
    evidence: tuple[Evidence, ...] = ()
    wishes: tuple[tuple[Segment, str], ...] = ()
    indexes_tail: bool = field(init=False)
    knows_diffuse: bool = field(init=False)
    searches: bool = field(init=False)
    searched_heads: tuple[int, ...] = field(init=False)
    learns: bool = field(init=False)
    ways: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.knows_diffuse = any(access.rule == DiffuseHead.name for access in self.plan.accesses)
        tail = [access for access in self.plan.accesses if access.part == NAME and not self.parts[NAME].on_gpu]
        grows = {FreshTail.name, ErrorBudget.name}
        ways = {access.way for access in self.plan.accesses if access.rule != WINDOW}
        self.ways = frozenset("exact" if way is None else str(way) for way in ways)
        self.searches = self.plan.searches
        shares = () if self.budget is None else self.budget.heads
        self.searched_heads = tuple(head for head, share in enumerate(shares) if share.way is not None)
        self.learns = self.budget is not None and self.budget.error_max > 0 and bool(self.evidence)
        self.indexes_tail = any(access.index is not None or access.rule in grows for access in tail)
