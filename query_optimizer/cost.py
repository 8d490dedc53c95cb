"""Turns the cost of a search (bytes, operations, jumps) into seconds on a given machine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from indexes.base import Cost

WARM = 0.5
"""The time of a step and its jumps when caches hold everything, relative to when they hold nothing; fitted with the defaults."""


class WrongMachine(ValueError):
    """These values describe no machine: one is missing, has another type, or is not a positive number."""


class _Numbers:
    """Checks and converts a frozen dataclass whose fields are all positive numbers."""

    def __post_init__(self) -> None:
        values: dict[str, Any] = vars(self)
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise WrongMachine(f"{name} is {value!r}; expected a positive number")

    def to_dict(self) -> dict[str, float]:
        """The numbers as plain values, which `from_dict` takes."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The numbers that `to_dict` wrote. Raises WrongMachine for a missing or unknown name, or a value that is not
        positive."""
        names = list(cls().to_dict())
        if sorted(map(str, values)) != sorted(names):
            raise WrongMachine(
                f"a machine is described by {', '.join(map(str, values)) or 'nothing'}; expected {', '.join(names)}"
            )
        return cls(**values)


@dataclass(frozen=True)
class Machine(_Numbers):
    """How much one machine does in a second, and how long its shortest calls take.

    The defaults describe the machine on which the formulas of `indexes` were fitted: two cores of an AMD EPYC with AVX-512 BF16.
    stream_bytes_s: how fast exact attention reads main memory, with all threads. cached_bytes_s: how fast it reads caches.
    cache_bytes: how much of a context that is read again and again stays in caches. operations_s: multiplications of the
    attention kernel, with all threads. jump_s: seconds to read one key that is in no cache, on one core. gather_bytes_s: how fast
    values at scattered places are read, with all threads. exact_call_s: seconds of a call that reads next to nothing. step_s:
    seconds of a step that searches, without its searches and reads. search_s: seconds of a search that reads next to nothing.
    Raises WrongMachine for a value that is not a positive number.
    """

    stream_bytes_s: float = 3.0e10
    cached_bytes_s: float = 4.4e10
    cache_bytes: float = 48e6
    operations_s: float = 1.35e11
    jump_s: float = 8.0e-8
    gather_bytes_s: float = 5e9
    exact_call_s: float = 1.2e-5
    step_s: float = 6e-5
    search_s: float = 1.4e-4

    def seconds(self, cost: Cost, working_set_nbytes: float = math.inf) -> float:
        """Seconds of a search alone, without the full read that follows where it gives up. working_set_nbytes: see
        `search_seconds`."""
        jumping = cost.jumps * self.jump_s * self._slowness(working_set_nbytes)
        return cost.nbytes / self.stream_bytes_s + cost.operations / self.operations_s + jumping

    def exact_seconds(self, nbytes: float, operations: float = 0.0, working_set_nbytes: float | None = None) -> float:
        """Seconds of a call that reads all keys and values.

        operations: two for each row, token and dimension; they matter where many rows share the reads. working_set_nbytes: the
        bytes of all keys and values that are read in turn, for example those of all layers of a model; None where there are no
        others.
        """
        among = nbytes if working_set_nbytes is None else max(working_set_nbytes, nbytes)
        cached = nbytes * self._cached(among)
        reading = cached / self.cached_bytes_s + (nbytes - cached) / self.stream_bytes_s
        return self.exact_call_s + max(reading, operations / self.operations_s)

    def search_seconds(self, cost: Cost, values_nbytes: float = 0.0, working_set_nbytes: float = math.inf) -> float:
        """Seconds of one search and of reading the values that it finds, without the full read that follows where it gives up.

        values_nbytes: counted for each query head, because heads do not share them. working_set_nbytes: the bytes of all keys and
        values that are read in turn; where caches hold most of them, scattered reads are fast.
        """
        values = (1 - cost.given_up) * values_nbytes
        return self.search_s + self.seconds(cost, working_set_nbytes) + self.values_seconds(values, working_set_nbytes)

    def step_seconds(self, working_set_nbytes: float = math.inf) -> float:
        """Seconds of a step that searches, without its searches and reads. working_set_nbytes: see `search_seconds`."""
        return self.step_s * self._slowness(working_set_nbytes)

    def values_seconds(self, nbytes: float, working_set_nbytes: float = math.inf) -> float:
        """Seconds of reading values at scattered places. working_set_nbytes: see `search_seconds`."""
        return nbytes / self.gather_bytes_s * self._slowness(working_set_nbytes)

    def _cached(self, nbytes: float) -> float:
        """The share of `nbytes` that caches hold."""
        return min(1.0, self.cache_bytes / nbytes) if nbytes > 0 else 1.0

    def _slowness(self, working_set_nbytes: float) -> float:
        """The time of scattered reads, relative to their time where caches hold nothing: between WARM and 1."""
        return 1 - (1 - WARM) * self._cached(working_set_nbytes)


@dataclass(frozen=True)
class GpuMachine(_Numbers):
    """How much a GPU does in a second, and how long its shortest calls take, from their launch until the host has the result.

    The defaults are assumed, not measured: the rates come from NVIDIA's data sheet of the H200 (SXM), with half the rate of its
    memory for scattered reads, and the times, which it does not give, are guesses; `kvdb calibrate` measures all of them.
    stream_bytes_s: reads of the card's memory in order. gather_bytes_s: reads of tokens at scattered places. operations_s:
    multiplications of 16-bit floats, each together with its addition, which a data sheet counts as two. host_bytes_s: copies from
    pinned main memory. call_s: seconds of a call of one launch. step_s: seconds of a call of several launches, such as a search.
    Raises WrongMachine for a value that is not a positive number.
    """

    stream_bytes_s: float = 4.8e12
    gather_bytes_s: float = 2.4e12
    operations_s: float = 4.945e14
    host_bytes_s: float = 6.4e10
    call_s: float = 2e-5
    step_s: float = 5e-5

    def exact_seconds(self, nbytes: float, operations: float = 0.0) -> float:
        """Seconds of a call that reads all keys and values on the card. operations: two for each row, token and dimension."""
        return self.call_s + max(nbytes / self.stream_bytes_s, operations / self.operations_s)

    def search_seconds(self, scanned_nbytes: float, selected_nbytes: float) -> float:
        """Seconds of a step on the card that reads `scanned_nbytes` of index pages and `selected_nbytes` of keys and values."""
        return self.step_s + scanned_nbytes / self.stream_bytes_s + selected_nbytes / self.gather_bytes_s
