"""Which indexes are to be built over a segment now: those that will pay. Numbers in, decisions with their reasons out.

An index costs something once and saves something with every query; how many queries will come is not known. That is the
ski-rental problem (Karlin et al., Competitive snoopy caching, 1988): who rents until the rent paid comes to the price, and buys
then, never pays more than twice what it costs who knew the future. With several kinds, each better and dearer than the one
before, the kinds form a ladder: the next rung is the kind whose price is reached first by what it saves over the rung below, and
each is bought on its own account (multislope ski rental; Lotker et al., Rent, lease or buy, 2008).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["missing", "building", "built", "failed"]


@dataclass(frozen=True)
class KindFacts:
    """A kind of index over one segment.

    build_seconds, nbytes: what building it over the layers without one is expected to take and to keep. saved_seconds: how much
    faster it would answer each query of a layer than what answers it now; negative where it would be slower.
    """

    kind: str
    build_seconds: float
    saved_seconds: float
    nbytes: int
    state: State = "missing"


@dataclass(frozen=True)
class SegmentFacts:
    """A segment and how it was used. A query is one call on one layer.

    opened: how many sessions were opened over it. queries: how many there were since its indexes last changed. queries_in_all:
    how many there were since it was stored. nbytes: what all indexes of the database keep, with those under way as if they were
    done. nbytes_max: what they may keep, None for no limit.
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
    """Decides which indexes pay. opened_often: a segment over which so many sessions were opened is expected to get as many
    queries again as it had in all."""

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
                expecting = False  # one rung at a time: what the next would save is known when this one answers
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
    """The kinds that pay after some number of queries, those that pay sooner first, which are also quicker to build.

    lower: seconds that are saved for each query already. From each rung, the next is the kind that needs the fewest queries to
    save its build time over it.
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
