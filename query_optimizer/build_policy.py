"""Which indexes are to be built over a segment now: those that will pay. Numbers in, decisions with their reasons out.

An index costs something once and saves something with every query; how many queries will come is not known. That is the
ski-rental problem (Karlin et al., Competitive snoopy caching, 1988): somebody who rents until the rent paid equals the price, and
then buys, never pays more than twice what somebody who knows the future pays. Several kinds, each faster and more expensive than
the one before, form a ladder: the next rung is the kind whose savings over the rung below reach its price first, and each rung is
paid for by its own savings (multislope ski rental; Lotker et al., Rent, lease or buy, 2008).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["missing", "building", "built", "failed"]


@dataclass(frozen=True)
class KindFacts:
    """A kind of index over one segment.

    build_seconds: the expected time to build it over the layers that lack it. nbytes: the memory that these indexes would keep.
    saved_seconds: the seconds it would save on each query of a layer, compared with what answers it now; negative where it would
    be slower.
    """

    kind: str
    build_seconds: float
    saved_seconds: float
    nbytes: int
    state: State = "missing"


@dataclass(frozen=True)
class SegmentFacts:
    """A segment and how it was used. A query is one call on one layer.

    opened: the number of sessions that were opened over it. queries: the number of queries since its indexes last changed.
    queries_in_all: the number since it was stored. nbytes: the memory of all indexes of the database, where those being built
    count as built. nbytes_max: the memory they may take, None for no limit.
    """

    opened: int
    queries: int
    queries_in_all: int
    kinds: tuple[KindFacts, ...]
    nbytes: int = 0
    nbytes_max: int | None = None


@dataclass(frozen=True)
class Decision:
    """Whether a kind of index is to be built now. reason: why, or why not."""

    kind: str
    build: bool
    reason: str


@dataclass(frozen=True)
class BuildPolicy:
    """Decides which indexes pay. opened_often: from this number of opened sessions on, a segment is expected to get as many
    queries again as it had so far."""

    opened_often: int = 3

    def decide(self, facts: SegmentFacts) -> tuple[Decision, ...]:
        """One decision for each kind: first the kinds to be built, the quickest to build first."""
        refused = {kind.kind: reason for kind in facts.kinds if (reason := _hindrance(kind, facts))}
        free = [kind for kind in facts.kinds if kind.kind not in refused]
        under_way = max((kind.saved_seconds for kind in facts.kinds if kind.state == "building"), default=0.0)
        taken: list[Decision] = []
        nbytes, lower, expecting = facts.nbytes, max(under_way, 0.0), facts.opened >= self.opened_often
        for rung in _ladder(free, lower):
            saved, lower = rung.saved_seconds - lower, rung.saved_seconds
            reason = _paid(rung, saved, facts.queries)
            if reason is None and expecting:
                reason = _will_pay(rung, saved, facts)
                expecting = False  # one rung at a time: what the next one saves is measured once this one answers queries
            if reason is None:
                refused[rung.kind] = _not_yet(rung, saved, facts.queries)
            elif facts.nbytes_max is not None and nbytes + rung.nbytes > facts.nbytes_max:
                refused[rung.kind] = _over_budget(rung, nbytes, facts.nbytes_max)
            else:
                nbytes += rung.nbytes
                taken.append(Decision(rung.kind, True, reason))
        others = [
            Decision(kind.kind, False, refused.get(kind.kind, "a kind that is being built, or pays sooner, saves as much"))
            for kind in facts.kinds
            if all(kind.kind != decision.kind for decision in taken)
        ]
        return (*taken, *others)


def _hindrance(kind: KindFacts, facts: SegmentFacts) -> str | None:
    """Why a kind is not considered; None if it is."""
    if kind.state == "failed":
        return "its last build failed; it is built again when somebody asks for it"
    if kind.state != "missing":
        return f"it is {kind.state}" if kind.state == "built" else "it is being built"
    if kind.saved_seconds <= 0:
        return "it would answer no faster than what there is"
    if facts.nbytes_max is not None and facts.nbytes + kind.nbytes > facts.nbytes_max:
        return _over_budget(kind, facts.nbytes, facts.nbytes_max)
    return None


def _ladder(kinds: Sequence[KindFacts], lower: float) -> list[KindFacts]:
    """The kinds that pay after some number of queries. The first pays soonest, and is also the quickest to build.

    lower: seconds that each query saves already. The next rung is always the kind that needs the fewest queries to save its build
    time, compared with the rung below.
    """
    rungs: list[KindFacts] = []
    while better := [kind for kind in kinds if kind.saved_seconds > lower]:
        rung = min(better, key=lambda kind: (kind.build_seconds / (kind.saved_seconds - lower), kind.build_seconds))
        rungs.append(rung)
        lower = rung.saved_seconds
    return rungs


def _paid(kind: KindFacts, saved: float, queries: int) -> str | None:
    if queries * saved < kind.build_seconds or not queries:
        return None
    return f"{queries:,} queries would have saved {queries * saved:.3g} s with it; building it takes {kind.build_seconds:.3g} s"


def _will_pay(kind: KindFacts, saved: float, facts: SegmentFacts) -> str | None:
    expected = facts.queries_in_all
    if expected * saved < kind.build_seconds or not expected:
        return None
    return (
        f"opened {facts.opened:,} times, so {expected:,} more queries are expected, which save {expected * saved:.3g} s; "
        f"building it takes {kind.build_seconds:.3g} s"
    )


def _not_yet(kind: KindFacts, saved: float, queries: int) -> str:
    return (
        f"{queries:,} queries would have saved {queries * saved:.3g} s of the {kind.build_seconds:.3g} s that it takes to build"
    )


def _over_budget(kind: KindFacts, nbytes: int, nbytes_max: int) -> str:
    return f"it keeps {kind.nbytes:,} bytes beside the {nbytes:,} of other indexes; all may keep {nbytes_max:,}"
