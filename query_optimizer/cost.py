"""From what a search takes to seconds, by what a machine does in a second."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from indexes.base import Cost

WARM = 0.5
"""What a step and its jumps take where caches hold all, of what they take where caches hold nothing. Fitted as the defaults."""


class WrongMachine(ValueError):
    """No description of a machine: a value is missing, of another type, or no positive number."""


class _Numbers:
    """Of a frozen dataclass whose fields are all positive numbers."""

    def __post_init__(self) -> None:
        values: dict[str, Any] = vars(self)
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise WrongMachine(f"{name} is {value!r}; expected a positive number")

    def to_dict(self) -> dict[str, float]:
        """Plain values, as `from_dict` takes them."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises WrongMachine for other names than those of the fields, or values that are no positive numbers."""
        names = list(cls().to_dict())
        if sorted(map(str, values)) != sorted(names):
            raise WrongMachine(
                f"a machine is described by {', '.join(map(str, values)) or 'nothing'}; expected {', '.join(names)}"
            )
        return cls(**values)


@dataclass(frozen=True)
class Machine(_Numbers):
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


@dataclass(frozen=True)
class GpuMachine(_Numbers):
    """What a GPU does in a second, and how long the shortest calls take, from their launch until the host has the result.

    The defaults are assumed, not measured: the rates are those of NVIDIA's data sheet of the H200 (SXM), with half the memory's
    for reads here and there, and the times, of which it says nothing, are guesses; `kvdb calibrate` measures all of them.
    stream_bytes_s: reads of the card's memory. gather_bytes_s: the same, of tokens here and there. operations_s: multiplications
    of 16-bit floats, each with its addition, where a data sheet counts two. host_bytes_s: copies from main memory that is pinned.
    call_s: of a call of one launch. step_s: of one of several launches, as a search makes. Raises WrongMachine for what is no
    positive number.
    """

    stream_bytes_s: float = 4.8e12
    gather_bytes_s: float = 2.4e12
    operations_s: float = 4.945e14
    host_bytes_s: float = 6.4e10
    call_s: float = 2e-5
    step_s: float = 5e-5

    def exact_seconds(self, nbytes: float, operations: float = 0.0) -> float:
        """Of a call that reads keys and values on the card whole. operations: two for each row, token and dimension."""
        return self.call_s + max(nbytes / self.stream_bytes_s, operations / self.operations_s)

    def search_seconds(self, scanned_nbytes: float, selected_nbytes: float) -> float:
        """Of a step on the card. scanned_nbytes: of index pages, read in order. selected_nbytes: of the keys and values found."""
        return self.step_s + scanned_nbytes / self.stream_bytes_s + selected_nbytes / self.gather_bytes_s

    def transfer_seconds(self, nbytes: float) -> float:
        """Of copies of blocks to the card."""
        return nbytes / self.host_bytes_s
