"""Arguments that are wrong, or nearly right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np


class Table(np.ndarray[Any, Any]):
    """Block addresses: trusted, so they are left out or repeated, never invented."""


class Trusted(int):
    """An address, a number of bytes at one, or a descriptor: trusted, so another one is none at all."""


def mutated(rng: random.Random, value: Any) -> Any:
    """Another value of the same type, or of nearly the same."""
    if isinstance(value, Table):
        return rng.choice(list(tables(rng, value)))
    if isinstance(value, np.ndarray):
        return rng.choice(list(arrays(rng, value)))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice(numbers(rng, value))
    if isinstance(value, dict) and value:
        name = rng.choice(list(value))
        return {**value, name: mutated(rng, value[name])}
    return rng.choice([value, None, 0, "x"])


def numbers(rng: random.Random, value: float) -> list[Any]:
    if isinstance(value, Trusted):
        return [-1, None, "x"]
    if isinstance(value, int):
        return [0, 1, -1, value + 1, value - 1, value * 2, 1 << 31, (1 << 63) - 1, -(1 << 63), rng.randrange(1000)]
    return [0.0, -value, float("nan"), float("inf"), float("-inf"), 1e38, 1e-38]


def tables(rng: random.Random, value: Table) -> Iterator[Any]:
    yield value[: rng.randrange(len(value) + 1)]
    yield np.concatenate([value, value]).view(Table)
    yield value[::-1]
    yield value[..., None]
    yield None


def arrays(rng: random.Random, value: np.ndarray) -> Iterator[np.ndarray]:
    yield value[: rng.randrange(len(value) + 1)] if value.ndim and len(value) else value
    yield np.concatenate([value, value]) if value.ndim else value
    yield np.frombuffer(random.Random(rng.random()).randbytes(value.nbytes), value.dtype).reshape(value.shape).copy()
    yield np.zeros_like(value)
    yield value[..., None]
    yield value.reshape(-1)
    yield value.astype(np.float64)
    yield np.asfortranarray(value)
    yield value[::-1]
    yield np.empty((0, *value.shape[1:]), value.dtype)
