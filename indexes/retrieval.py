"""Which tokens a query needs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite, log
from numbers import Real
from typing import Any

from indexes.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Exact:
    """Every visible token: full attention, the same call as every approximation, and the truth they are compared with."""

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True, slots=True)
class Dipr:
    """Every visible token whose softmax weight is at least alpha times the largest (AlayaDB, arXiv 2504.10326, definition 2).

    The largest weight is taken over everything that the query sees. alpha: in (0, 1]. Raises InvalidArgument.
    """

    alpha: float = 0.012

    def __post_init__(self) -> None:
        if not is_share(self.alpha):
            raise InvalidArgument(f"Dipr.alpha is {self.alpha!r}; expected a number in (0, 1], the share of the largest weight")

    def beta(self, scale: float) -> float:
        """The range in units of q.k: a token is retrieved when q.k >= max - beta."""
        return -log(self.alpha) / scale

    def __str__(self) -> str:
        return f"dipr({self.alpha:g})"


@dataclass(frozen=True, slots=True)
class TopK:
    """The k visible tokens with the largest weights, or all where there are fewer. Raises InvalidArgument for a k below 1."""

    k: int

    def __post_init__(self) -> None:
        if type(self.k) is not int or self.k < 1:
            raise InvalidArgument(f"TopK.k is {self.k!r}; expected an integer of at least 1")

    def __str__(self) -> str:
        return f"top_k({self.k})"


@dataclass(frozen=True, slots=True)
class TopP:
    """The fewest visible tokens that together have at least the share p of the softmax mass. p: in (0, 1].

    Raises InvalidArgument.
    """

    p: float

    def __post_init__(self) -> None:
        if not is_share(self.p):
            raise InvalidArgument(f"TopP.p is {self.p!r}; expected a number in (0, 1], the share of the softmax mass")

    def __str__(self) -> str:
        return f"top_p({self.p:g})"


Retrieval = Exact | Dipr | TopK | TopP
KINDS = {"exact": Exact, "dipr": Dipr, "top_k": TopK, "top_p": TopP}
"""The retrievals by their names in text."""


def retrieval_to_dict(retrieval: Retrieval) -> dict[str, Any]:
    """A retrieval as plain values, which `retrieval_from_dict` takes."""
    kind = next(name for name, cls in KINDS.items() if isinstance(retrieval, cls))
    return {"kind": kind, **asdict(retrieval)}


def retrieval_from_dict(values: Mapping[str, Any]) -> Retrieval:
    """The retrieval that `retrieval_to_dict` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    given = dict(values)
    made: Retrieval = KINDS[given.pop("kind")](**given)
    return made


def kernel_parameter(retrieval: Retrieval, scale: float, tokens: int) -> tuple[int, float]:
    """The number by which kernels know a retrieval among `tokens` tokens, and its parameter in their units. Raises ValueError for
    a scale that is not a positive number."""
    if not isfinite(scale) or scale <= 0:
        raise ValueError(f"scale is {scale}; expected a positive number")
    match retrieval:
        case Exact():
            return 0, 0.0
        case Dipr():
            return 1, retrieval.beta(scale)
        case TopK():
            return 2, float(min(retrieval.k, max(tokens, 1)))
        case TopP():
            return 3, retrieval.p


def is_share(given: Any) -> bool:
    """Whether a value is a number in (0, 1]."""
    number = not isinstance(given, bool) and isinstance(given, Real)
    return number and bool(0 < given <= 1)
