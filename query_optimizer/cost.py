"""From what a search takes to seconds, by what a machine does in a second."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from indexes.base import Cost

WARM = 0.5
"""What a step and its jumps take where caches hold all, of what they take where caches hold nothing. Fitted as the defaults."""


class WrongMachine(ValueError):
    """No description of a machine: a value is missing, of another type, or no positive number."""


@dataclass(frozen=True)
class Machine:
    """What one machine does in a second, and how long some calls take however little they do.

    The defaults are those of the machine that the formulas of `indexes` were fitted on: two cores of an AMD EPYC with AVX-512
    BF16. stream_bytes_s: exact attention reads of main memory, with all threads. cached_bytes_s: the same, of caches.
    cache_bytes: how much they hold of a context that is read again and again. operations_s: multiplications of the attention
    kernel, with all threads. jump_s: a read of a key that is in no cache, on one core. gather_bytes_s: reads of values here and
    there, with all threads. exact_call_s: of a call that reads next to nothing. step_s: what a step by an index takes beside its
    searches and what it reads. search_s: the same of one search. Raises WrongMachine for what is no positive number.
    """

    stream_bytes_s: float = 3.0e10
    cached_bytes_s: float = 4.4e10
    cache_bytes: float = 48e6
    operations_s: float = 1.35e11
    jump_s: float = 8.0e-8
    gather_bytes_s: float = 5e9
    exact_call_s: float = 1.2e-5
    step_s: float = 2.8e-4
    search_s: float = 2.0e-4

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise WrongMachine(f"{name} is {value!r}; expected a positive number")

    def seconds(self, cost: Cost, among_nbytes: float = math.inf) -> float:
        """Of the search alone; what is given up is not counted. among_nbytes: see `search_seconds`."""
        jumping = cost.jumps * self.jump_s * self._slowness(among_nbytes)
        return cost.nbytes / self.stream_bytes_s + cost.operations / self.operations_s + jumping

    def exact_seconds(self, nbytes: float, operations: float = 0.0, among_nbytes: float | None = None) -> float:
        """Of a call that reads keys and values whole.

        operations: two for each row, token and dimension; they matter where many rows share the reads. among_nbytes: of all keys
        and values that are read in turn, as those of a model's layers are; None where there are no others.
        """
        among = nbytes if among_nbytes is None else max(among_nbytes, nbytes)
        cached = nbytes * self._cached(among)
        reading = cached / self.cached_bytes_s + (nbytes - cached) / self.stream_bytes_s
        return self.exact_call_s + max(reading, operations / self.operations_s)

    def search_seconds(
        self,
        window_nbytes: float,
        costs: Iterable[Cost],
        values_nbytes: float = 0.0,
        whole_seconds: float = 0.0,
        among_nbytes: float = math.inf,
    ) -> float:
        """Of a step: the window, each search, and the values of what they find.

        values_nbytes: counted for each query head, as heads do not share them. whole_seconds: of reading everything, for the KV
        heads that are given up. among_nbytes: of all keys and values that are read in turn; where caches hold most of them, what
        a step looks up here and there is in one.
        """
        costs = tuple(costs)
        searches = sum(self.search_s + self.seconds(cost, among_nbytes) for cost in costs)
        given_up = max((cost.given_up for cost in costs), default=0.0)
        reading = window_nbytes / self.stream_bytes_s + self.values_seconds((1 - given_up) * values_nbytes, among_nbytes)
        return self.step_seconds(among_nbytes) + searches + reading + given_up * whole_seconds

    def step_seconds(self, among_nbytes: float = math.inf) -> float:
        """Of a step beside its searches and what it reads. among_nbytes: as `search_seconds` takes it."""
        return self.step_s * self._slowness(among_nbytes)

    def values_seconds(self, nbytes: float, among_nbytes: float = math.inf) -> float:
        """Of reading values here and there. among_nbytes: as `search_seconds` takes it."""
        return nbytes / self.gather_bytes_s * self._slowness(among_nbytes)

    def _cached(self, nbytes: float) -> float:
        """The share that caches hold of so many bytes."""
        return min(1.0, self.cache_bytes / nbytes) if nbytes > 0 else 1.0

    def _slowness(self, among_nbytes: float) -> float:
        return 1 - (1 - WARM) * self._cached(among_nbytes)

    def to_dict(self) -> dict[str, float]:
        """Plain values, as `from_dict` takes them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises WrongMachine for other names than those of the fields, or values that are no positive numbers."""
        names = [field.name for field in fields(cls)]
        if sorted(map(str, values)) != sorted(names):
            raise WrongMachine(
                f"a machine is described by {', '.join(map(str, values)) or 'nothing'}; expected {', '.join(names)}"
            )
        return cls(**values)
