"""What a query asks for beside its vectors."""

from dataclasses import dataclass

from indexes.retrieval import Retrieval


@dataclass(frozen=True, slots=True)
class Hints:
    """How a query is to be answered, by which the optimizer abides.

    index: the kind of index to search, None for any. rules_off: names of rules that are passed over. memory_budget: bytes that
    the window and the indexes of one layer may take, None for no limit; kinds that keep more are not searched. Raises ValueError
    for names that are no text, and a budget that is not positive.
    """

    index: str | None = None
    rules_off: tuple[str, ...] = ()
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        index: object = self.index
        names: object = self.rules_off
        budget = self.memory_budget
        if not (index is None or isinstance(index, str)):
            raise ValueError(f"Hints.index is {index!r}; expected the name of a kind of index, or None for any")
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"Hints.rules_off is {names!r}; expected a tuple of the names of rules")
        object.__setattr__(self, "rules_off", tuple(names))  # a list cannot be the key that plans are kept by
        if budget is not None and (type(budget) is not int or budget < 1):
            raise ValueError(f"Hints.memory_budget is {budget!r}; expected a positive number of bytes, or None for no limit")


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a query asks for beside its vectors.

    retrieval: None lets the optimizer decide. missed_mass_max: read on until the softmax mass that was left out is proven to be
    at most this share, None for no such proof. estimate_tail: add an estimate of the attention over what was left out. Raises
    ValueError for a share outside (0, 1].
    """

    retrieval: Retrieval | None = None
    missed_mass_max: float | None = None
    estimate_tail: bool = False
    hints: Hints = NO_HINTS

    def __post_init__(self) -> None:
        if self.missed_mass_max is not None and not 0 < self.missed_mass_max <= 1:
            raise ValueError(
                f"max_missed_mass is {self.missed_mass_max!r}; expected a share of the softmax mass in (0, 1], or None"
            )
