"""The protocol of a device that helps to build indexes. Arrays go in and come out, one KV head after the other, so that indexes
know nothing about devices."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Int32 = npt.NDArray[np.int32]
Clusters = npt.NDArray[np.uint16]


class AcceleratorLost(Exception):
    """The device failed, or its memory is too small; the build goes on without it."""


@dataclass(frozen=True)
class KMeans:
    """How the keys of one segment are clustered: Lloyd's algorithm on the keys minus their mean, by L2 distance.

    tokens: the tokens of a segment. count: the number of clusters, at most 65,536. seeds: int64, at most `count` different
    tokens, each the start of one cluster; the other clusters start at the keys farthest from their centroid, after the first of
    the `iterations` rounds.
    """

    tokens: int
    count: int
    iterations: int
    seeds: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tokens: int, count: int, iterations: int, far: float) -> "KMeans":
        """The settings with the seeds of the native build (`native/coarse/build.cpp`). far: the share that starts far away."""
        return cls(tokens, count, iterations, _seeds(tokens, count - int(np.float32(far) * np.float32(count))))


class Accelerator(Protocol):
    """A device that takes one array for each KV head, and returns one for each, in the same order. It reads ahead, so that one
    head is copied while another is computed. Arrays hold float32, float16 or ml_dtypes.bfloat16; head_dim is the same for all."""

    def neighbours(self, heads: Iterable[tuple[Array, Array]], k: int) -> Iterator[Int32]:
        """The tokens with the largest q.k, largest first: int32 `[m, min(k, n)]` for keys `[n, head_dim]` and queries
        `[m, head_dim]`. Exact, to the rounding of float32. Raises AcceleratorLost."""
        ...

    def nearest_before(self, heads: Iterable[Array], k: int) -> Iterator[Int32]:
        """For each key the nearest ones among the keys before it, by L2 distance, nearest first: int32 `[n, k]` for keys `[n,
        head_dim]`, -1 behind the last. Exact, to the rounding of float32. Raises AcceleratorLost."""
        ...

    def clusters(self, heads: Iterable[Array], how: KMeans) -> Iterator[Clusters]:
        """The cluster of each token, one of `how.count` in each segment: uint16 `[segments, how.tokens]` for keys
        `[segments * how.tokens, head_dim]`. Raises AcceleratorLost."""
        ...


def _seeds(tokens: int, count: int) -> npt.NDArray[np.int64]:
    """The tokens that the native build draws: a shuffle of all, cut short."""
    order, state = np.arange(tokens), 0x9E3779B97F4A7C15
    for i in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        other = i + (state >> 33) % (tokens - i)
        order[i], order[other] = order[other], order[i]
    return order[:count].astype(np.int64)
