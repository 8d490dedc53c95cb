"""What a query asks for beside its vectors."""

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from indexes.errors import InvalidArgument
from indexes.retrieval import Exact, Retrieval, is_share

PROVEN = "an error_max is kept by choosing among ways that are proven on the model's own queries"
"""Ends a message that says why a query cannot be given an error_max and something else."""


@dataclass(frozen=True, slots=True)
class Hints:
    """How a query is to be answered. The optimizer follows them.

    index: the kind of index to search, None for any. rules_off: names of rules that are skipped. memory_budget: bytes that the
    window and the indexes of one layer may take, None for no limit; kinds that keep more are not searched. Raises InvalidArgument
    for names that are not strings, and a budget that is not positive.
    """

    index: str | None = None
    rules_off: tuple[str, ...] = ()
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        index: object = self.index
        names: object = self.rules_off
        budget = self.memory_budget
        if not (index is None or isinstance(index, str)):
            raise InvalidArgument(f"Hints.index is {index!r}; expected the name of a kind of index, or None for any")
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise InvalidArgument(f"Hints.rules_off is {names!r}; expected a tuple of the names of rules")
        object.__setattr__(self, "rules_off", tuple(names))  # plans are kept by their hints, and a list cannot be a key
        if budget is not None and (type(budget) is not int or budget < 1):
            raise InvalidArgument(f"Hints.memory_budget is {budget!r}; expected a positive number of bytes, or None for no limit")


NO_HINTS = Hints()


def checked_error_max(given: Any) -> float | None:
    """The largest relative error as a float, None for None. Raises InvalidArgument for what is no number in [0, 1]."""
    if given is None:
        return None
    number = not isinstance(given, bool) and isinstance(given, Real)
    if not (number and bool(0 <= given <= 1)):
        raise InvalidArgument(
            f"error_max is {given!r}; expected the largest relative error of a layer's output, from 0, which is exact, to 1, "
            "or None for the default"
        )
    return float(given)


@dataclass(frozen=True, slots=True)
class QueryOptions:
    """What a query asks for beside its vectors: one value, made where a caller's keywords come in and handed down as it is.

    retrieval: which tokens are read, None lets the optimizer decide. max_missed_mass: read on until the softmax mass that was
    left out is proven to be at most this share, None for no such proof. estimate_tail: add an estimate of the attention over what
    was left out, where the index can make one. hints: how the query is to be answered; None stands for no hints. error_max: how
    far the layer's output may be from exact attention, the L2 norm of the difference over all query heads relative to that of the
    exact output; 0 is exact, None the default of the session or the server. Raises InvalidArgument for a value of a wrong type, a
    share outside (0, 1], an error_max outside [0, 1], and an error_max beside what would override it.
    """

    retrieval: Retrieval | None = None
    max_missed_mass: float | None = None
    estimate_tail: bool = False
    hints: Hints = NO_HINTS
    error_max: float | None = None

    def __post_init__(self) -> None:
        retrieval: object = self.retrieval
        share = self.max_missed_mass
        hints: object = self.hints
        if retrieval is not None and not isinstance(retrieval, Retrieval):
            raise InvalidArgument(
                f"retrieval is {retrieval!r}; expected kvdb.Exact(), kvdb.Dipr(alpha), kvdb.TopK(k) or kvdb.TopP(p), "
                "or None to let the optimizer decide"
            )
        if share is not None:
            if not is_share(share):
                raise InvalidArgument(f"max_missed_mass is {share!r}; expected a share of the softmax mass in (0, 1], or None")
            object.__setattr__(self, "max_missed_mass", float(share))
        if hints is None:
            object.__setattr__(self, "hints", NO_HINTS)
        elif not isinstance(hints, Hints):
            raise InvalidArgument(f"hints are {hints!r}; expected kvdb.Hints(index=, rules_off=, memory_budget=), or None")
        if not isinstance(self.estimate_tail, int):
            raise InvalidArgument(f"estimate_tail is {self.estimate_tail!r}; expected True or False")
        object.__setattr__(self, "estimate_tail", bool(self.estimate_tail))
        object.__setattr__(self, "error_max", checked_error_max(self.error_max))
        if self.error_max is not None and not self.budgeted:
            raise InvalidArgument(self._overriding())

    @property
    def budgeted(self) -> bool:
        """Whether the query leaves the way of answering open, so that an error_max decides: its own, or a default."""
        return self.retrieval is None and self.max_missed_mass is None and not self.estimate_tail

    def with_default(self, error_max: float) -> "QueryOptions":
        """These options with an error_max, where they leave it to a default; otherwise the same. A query that names an index, and
        no error_max, is a search by that index for the default range, unless the default is exact."""
        if self.error_max is not None or not self.budgeted or (self.hints.index is not None and error_max > 0):
            return self
        return replace(self, error_max=error_max)

    def _overriding(self) -> str:
        """A message that says what else decides how the query is answered, so that its error_max could not."""
        if isinstance(self.retrieval, Exact):
            other, why = "retrieval=exact", "its error is 0, whatever may be spent"
        elif self.retrieval is not None:
            other, why = f"retrieval={self.retrieval}", "what a retrieval names is what is read, whatever its error"
        elif self.max_missed_mass is not None:
            other, why = f"max_missed_mass={self.max_missed_mass:g}", "it is a bound that holds for every query"
        else:
            other, why = "estimate_tail=True", "an estimate that is asked for is made, whatever its error"
        return f"error_max is {self.error_max:g} beside {other}, which would win: {why}, while {PROVEN}; expected one of the two"


NO_OPTIONS = QueryOptions()
"""A query that leaves everything to the optimizer."""
