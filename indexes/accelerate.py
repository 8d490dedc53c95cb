"""What a device can do for builds: arrays in and out, KV head by KV head, so that indexes know nothing of the device."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Int32 = npt.NDArray[np.int32]
Clusters = npt.NDArray[np.uint16]


class AcceleratorLost(Exception):
    """The device failed, or its memory does not do; a build that gets this goes on without it."""


@dataclass(frozen=True)
class KMeans:
    """How the keys of one segment are clustered: Lloyd's algorithm on the keys less their mean, by distance.

    tokens: of a segment. count: of clusters, at most 65,536. Those that `seeds` names start there, the others, after the first
    of the `iterations` rounds, at the keys farthest from their centroid. seeds: int64, different tokens, at most `count`.
    """

    tokens: int
    count: int
    iterations: int
    seeds: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tokens: int, count: int, iterations: int, far: float) -> "KMeans":
        """With the seeds that the native build takes (`native/coarse/build.cpp`). far: the share that starts far away."""
        return cls(tokens, count, iterations, _seeds(tokens, count - int(np.float32(far) * np.float32(count))))


class Accelerator(Protocol):
    """Takes and gives an array for each KV head, in their order, and reads ahead, so that heads are copied to the device while
    others are computed there. Arrays hold float32, float16 or ml_dtypes.bfloat16; head_dim is the same for all."""

    def neighbours(self, heads: Iterable[tuple[Array, Array]], k: int) -> Iterator[Int32]:
        """Of keys `[n, head_dim]` and queries `[m, head_dim]`: int32 `[m, min(k, n)]`, the tokens with the largest q.k, largest
        first. Exact, to the rounding of float32. Raises AcceleratorLost."""
        ...

    def nearest_before(self, heads: Iterable[Array], k: int) -> Iterator[Int32]:
        """Of keys `[n, head_dim]`: int32 `[n, k]`, for each the nearest of the keys before it, by L2 distance, nearest first; -1
        behind the last. Exact, to the rounding of float32. Raises AcceleratorLost."""
        ...

    def clusters(self, heads: Iterable[Array], how: KMeans) -> Iterator[Clusters]:
        """Of keys `[segments * how.tokens, head_dim]`: uint16 `[segments, how.tokens]`, the cluster of each token, of `how.count`
        in each segment. Raises AcceleratorLost."""
        ...


def _seeds(tokens: int, count: int) -> npt.NDArray[np.int64]:
    """The tokens that the native build draws: a shuffle of all, cut short."""
    order, state = np.arange(tokens), 0x9E3779B97F4A7C15
    for i in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        other = i + (state >> 33) % (tokens - i)
        order[i], order[other] = order[other], order[i]
    return order[:count].astype(np.int64)
