"""Which tokens a query needs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import log
from typing import Any


@dataclass(frozen=True, slots=True)
class Exact:
    """Every visible token: full attention, the oracle that stands behind the same call as every approximation."""

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True, slots=True)
class Dipr:
    """Every visible token whose softmax weight is at least alpha times the largest (AlayaDB, arXiv 2504.10326, definition 2).

    The largest weight is that over everything the query sees. alpha: in (0, 1]. Raises ValueError.
    """

    alpha: float = 0.012

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"Dipr.alpha is {self.alpha!r}; expected a number in (0, 1], the share of the largest weight")

    def beta(self, scale: float) -> float:
        """The range in units of q.k: a token is wanted when q.k >= max - beta."""
        return -log(self.alpha) / scale

    def __str__(self) -> str:
        return f"dipr({self.alpha:g})"


@dataclass(frozen=True, slots=True)
class TopK:
    """The k visible tokens of the largest weight; all, where there are fewer. Raises ValueError for a k below 1."""

    k: int

    def __post_init__(self) -> None:
        if type(self.k) is not int or self.k < 1:
            raise ValueError(f"TopK.k is {self.k!r}; expected an integer of at least 1")

    def __str__(self) -> str:
        return f"top_k({self.k})"


@dataclass(frozen=True, slots=True)
class TopP:
    """The fewest visible tokens that together have at least the share p of the softmax mass. p: in (0, 1]. Raises ValueError."""

    p: float

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(f"TopP.p is {self.p!r}; expected a number in (0, 1], the share of the softmax mass")

    def __str__(self) -> str:
        return f"top_p({self.p:g})"


Retrieval = Exact | Dipr | TopK | TopP
KINDS = {"exact": Exact, "dipr": Dipr, "top_k": TopK, "top_p": TopP}
"""The retrievals by the names they have in text."""


def retrieval_to_dict(retrieval: Retrieval) -> dict[str, Any]:
    """Plain values; `retrieval_from_dict` takes them back."""
    kind = next(name for name, cls in KINDS.items() if isinstance(retrieval, cls))
    return {"kind": kind, **asdict(retrieval)}


def retrieval_from_dict(values: Mapping[str, Any]) -> Retrieval:
    """What `retrieval_to_dict` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    given = dict(values)
    made: Retrieval = KINDS[given.pop("kind")](**given)
    return made
