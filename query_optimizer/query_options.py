"""What a query asks for beside its vectors."""

from dataclasses import dataclass

from indexes.errors import InvalidArgument
from indexes.retrieval import Retrieval, is_share


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


@dataclass(frozen=True, slots=True)
class QueryOptions:
    """What a query asks for beside its vectors: one value, made where a caller's keywords come in and handed down as it is.

    retrieval: which tokens are read, None lets the optimizer decide. max_missed_mass: read on until the softmax mass that was
    left out is proven to be at most this share, None for no such proof. estimate_tail: add an estimate of the attention over what
    was left out, where the index can make one. hints: how the query is to be answered; None stands for no hints. Raises
    InvalidArgument for a value of a wrong type, and a share outside (0, 1].
    """

    retrieval: Retrieval | None = None
    max_missed_mass: float | None = None
    estimate_tail: bool = False
    hints: Hints = NO_HINTS

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


NO_OPTIONS = QueryOptions()
"""A query that leaves everything to the optimizer."""
