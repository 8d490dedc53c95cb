"""Ways of answering a KV head without reading everything, and what is known about each before it may be used."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from indexes.retrieval import Dipr, Retrieval, TopK, retrieval_from_dict, retrieval_to_dict


@dataclass(frozen=True, slots=True)
class Way:
    """A way of answering. kind: the kind of index that is searched. retrieval: the retrieval of that search. estimate_tail:
    whether the attention over all other tokens is estimated."""

    kind: str
    retrieval: Retrieval
    estimate_tail: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The way as plain values, which `from_dict` takes."""
        return asdict(self) | {"retrieval": retrieval_to_dict(self.retrieval)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Way":
        """The way that `to_dict` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(**(values | {"retrieval": retrieval_from_dict(values["retrieval"])}))

    def __str__(self) -> str:
        return f"{self.kind} {self.retrieval}" + (" and estimate" if self.estimate_tail else "")


@dataclass(frozen=True, slots=True)
class WayFacts:
    """What audits showed of one way, an entry for each KV head.

    An audit answers a query exactly and by the way. audits: how many count. bounds: what the 95th percentile of the head's error
    does not exceed, with a confidence of 95 %; infinite while there are too few audits. least: what it is at least, with that
    confidence. given_up: the share of audits in which the search gave up on the head, which was then read whole. waits: whether
    the way was withdrawn for the head and is not tried for now. time_share: the time of searching for all heads relative to that
    of an exact answer; None where unknown.

    The error of a KV head is the L2 norm of the difference of its query heads' outputs, relative to the norm of the layer's exact
    output over all query heads.
    """

    way: Way
    audits: tuple[int, ...]
    bounds: tuple[float, ...]
    least: tuple[float, ...]
    given_up: tuple[float, ...]
    waits: tuple[bool, ...]
    time_share: float | None = None

    @classmethod
    def unknown(cls, way: Way, kv_heads: int) -> "WayFacts":
        """The facts of a way that was never audited."""
        return cls(way, (0,) * kv_heads, (inf,) * kv_heads, (-inf,) * kv_heads, (0.0,) * kv_heads, (False,) * kv_heads)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """How one KV head is answered, and how large its error may be.

    way: None where everything is read. bound: what the 95th percentile of its error is proven not to exceed. error_max: what it
    may be, so that all heads together keep the layer's budget. audits: how many answers were compared.
    """

    way: Way | None = None
    bound: float = 0.0
    error_max: float = 0.0
    audits: int = 0


@dataclass(frozen=True, slots=True)
class LayerBudget:
    """The error that one layer's output may have, relative to exact attention, and how its KV heads spend it.

    ways: everything that is known, in the order in which ways are tried. heads: one share for each KV head. read_seconds: the
    expected time of reading everything. trial: a way by which all heads are answered, proven or not, because the answer is only
    compared with an exact one.
    """

    error_max: float
    ways: tuple[WayFacts, ...]
    heads: tuple[HeadShare, ...]
    read_seconds: float = 0.0
    trial: Way | None = None

    def way_of(self, head: int) -> Way | None:
        """The way by which a head is answered, None where it is read whole."""
        return self.trial if self.trial is not None else self.heads[head].way


LADDER: Sequence[tuple[Retrieval, bool]] = (
    (Dipr(0.012), False),
    (TopK(64), True),
    (Dipr(0.012), True),
    (Dipr(0.001), False),
    (TopK(256), True),
)
"""The retrievals that are tried, and whether the rest is estimated, the fastest first."""


def candidates(kinds: Sequence[tuple[str, bool, bool]]) -> tuple[Way, ...]:
    """The ways in which indexes can answer, in the order in which they are tried.

    kinds: for each index its kind, whether it estimates tails, and whether it finds the k largest and nothing else.
    """
    ways = []
    for retrieval, estimate_tail in LADDER:
        for kind, estimates, ranks_only in kinds:
            fits = estimates if estimate_tail else not estimates  # what can estimate costs little more when it does
            if fits and (isinstance(retrieval, TopK) or not ranks_only):
                ways.append(Way(kind, retrieval, estimate_tail))
    return tuple(ways)
