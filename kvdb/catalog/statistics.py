"""What the queries of one segment were like, by layer and head: what the optimizer goes by, and what `kvdb stats` shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt

from kvdb.types import MEASURES, Float32, Observation, SegmentStatistics

MEMORY = 16
"""An observation counts for 1/16 of an average, or for 1/n where it is the n-th of fewer."""

Int64 = npt.NDArray[np.int64]

_WEIGHTS = np.array([0, *(1 / n for n in range(1, MEMORY + 1))], np.float32)


@dataclass(frozen=True)
class Searches:
    """Searches of one kind of index, one query each: how many, and averages of what they took and of the tokens looked at."""

    count: int
    seconds: float
    tokens: float

    def with_one(self, seconds: float, tokens: float) -> "Searches":
        """These and one more."""
        count = self.count + 1
        weight = 1 / min(count, MEMORY)
        return Searches(count, self.seconds + weight * (seconds - self.seconds), self.tokens + weight * (tokens - self.tokens))


@dataclass(frozen=True)
class LayerStatistics:
    """One layer of a segment as it was at some moment. Arrays are `[q_heads]`, read-only, and never change.

    queries: int64, how many were observed; answered: int64, those of them whose largest token is known. The others are float32
    averages, as in `kvdb.types.SegmentStatistics`. searches: by kind of index.
    """

    queries: Int64
    answered: Int64
    retrieved: Float32
    dense: Float32
    sharpness: Float32
    window_hits: Float32
    searches: Mapping[str, Searches]


@dataclass(frozen=True)
class _State:
    """counts: int64 `[4, q_heads]`, how often each value was seen; averages: float32, the same. Replaced, never written."""

    counts: Int64
    averages: Float32
    searches: Mapping[str, Searches]


class Statistics:
    """Exponential averages over the observed queries of one segment. Thread-safe.

    version: how many observations there were.
    """

    def __init__(self) -> None:
        self.version = 0
        self._layers: dict[int, _State] = {}
        self._looked: dict[int, int] = {}
        self._lock = Lock()

    def observe(self, layer: int, one: Observation) -> None:
        """Take in what one query of a layer showed."""
        with self._lock:
            state = self._layers.get(layer)
            if state is None:
                state = _State(np.zeros(one.values.shape, np.int64), np.zeros(one.values.shape, np.float32), {})
            counts = state.counts + (1 if one.seen is None else one.seen)
            weights = _WEIGHTS[np.minimum(counts, MEMORY)]
            if one.seen is not None:
                weights *= one.seen
            averages = state.averages + weights * (one.values - state.averages)
            searched = state.searches.get(one.kind, _NONE).with_one(one.seconds, one.tokens)
            self._layers[layer] = _State(counts, averages, {**state.searches, one.kind: searched})
            self.version += 1

    def of(self, layer: int) -> LayerStatistics | None:
        """One layer as it is now; None where nothing was observed yet."""
        state = self._layers.get(layer)
        if state is None:
            return None
        state.counts.flags.writeable = state.averages.flags.writeable = False
        retrieved, dense, sharpness, window_hits = state.averages
        queries, _, answered, _ = state.counts
        return LayerStatistics(queries, answered, retrieved, dense, sharpness, window_hits, state.searches)

    def looked(self, layer: int, queries: int) -> None:
        """Remember that somebody looked at what queries of a layer want, when so many had been asked of the segment."""
        self._looked[layer] = queries

    def looked_at(self, layer: int) -> int:
        """How many had been asked when somebody last did."""
        return self._looked.get(layer, 0)

    def of_segment(self, number: int, tokens: int, shape: tuple[int, int]) -> SegmentStatistics:
        """Every layer as it is now. number, tokens: of the segment. shape: layers and q_heads."""
        queries = np.zeros(shape, np.int64)
        averages = np.zeros((len(MEASURES), *shape), np.float32)
        for layer, state in list(self._layers.items()):
            queries[layer], averages[:, layer] = state.counts[0], state.averages
        queries.flags.writeable = averages.flags.writeable = False
        return SegmentStatistics(number, tokens, queries, *averages)


_NONE = Searches(0, 0.0, 0.0)
