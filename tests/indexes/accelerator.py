"""An accelerator in numpy: float64, one array at a time."""

import numpy as np

from indexes.accelerate import AcceleratorLost


class Plain:
    """calls: the names of what was asked, each KV head once. heads_max: of each call, after which it is lost, None for never."""

    def __init__(self, heads_max=None):
        self.calls = []
        self.heads_max = heads_max

    def neighbours(self, heads, k):
        for keys, queries in self._taken(heads, "neighbours"):
            scores = queries.astype(np.float64) @ keys.astype(np.float64).T
            near = np.argpartition(-scores, min(k, len(keys) - 1), axis=1)[:, :k]
            order = np.argsort(-np.take_along_axis(scores, near, 1), axis=1, kind="stable")
            yield np.take_along_axis(near, order, 1).astype(np.int32)

    def nearest_before(self, heads, k):
        for keys in self._taken(heads, "nearest_before"):
            yield brute_nearest_before(keys, k)

    def clusters(self, heads, how):
        """By token number, which no k-means would find."""
        for keys in self._taken(heads, "clusters"):
            segments = len(keys) // how.tokens
            yield np.tile(np.arange(how.tokens) % how.count, (segments, 1)).astype(np.uint16)

    def _taken(self, heads, name):
        for done, head in enumerate(heads):
            if done == self.heads_max:
                raise AcceleratorLost("the device of this test")
            self.calls.append(name)
            yield head


def brute_nearest_before(keys, k, chunk=512):
    """int32 `[n, k]`, in float64."""
    x = keys.astype(np.float64)
    n = len(x)
    out = np.full((n, k), -1, np.int32)
    for begin in range(0, n, chunk):
        rows = np.arange(begin, min(begin + chunk, n))
        distance = np.square(x[: rows[-1] + 1]).sum(1) - 2 * x[rows] @ x[: rows[-1] + 1].T  # less the row's own length
        distance[np.arange(rows[-1] + 1) >= rows[:, None]] = np.inf
        near = np.argpartition(distance, min(k, rows[-1]), axis=1)[:, :k]
        near = np.take_along_axis(near, np.argsort(np.take_along_axis(distance, near, 1), axis=1, kind="stable"), 1)
        out[rows, : near.shape[1]] = np.where(np.isfinite(np.take_along_axis(distance, near, 1)), near, -1)
    return out
