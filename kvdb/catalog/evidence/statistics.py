"""What the queries of one segment were like, by layer and head: the optimizer decides by it, and `kvdb stats` shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt

from kvdb.attention.observation import Observation
from kvdb.catalog.evidence.audited_errors import audited_errors
from kvdb.catalog.evidence.evidence import Evidence
from kvdb.types import MEASURES, Float32, SegmentStatistics

MEMORY = 16
"""The weight of an observation in an average is 1/16, or 1/n while there are n < 16."""

Int64 = npt.NDArray[np.int64]

_WEIGHTS = np.array([0, *(1 / n for n in range(1, MEMORY + 1))], np.float32)


@dataclass(frozen=True)
class LayerStatistics:
    """One layer of a segment as it was at some moment. Arrays are `[q_heads]`, read-only, and never change.

    queries: int64, the number of observed queries. retrieved, dense: float32 averages, as in `kvdb.types.SegmentStatistics`.
    """

    queries: Int64
    retrieved: Float32
    dense: Float32


@dataclass(frozen=True)
class LayerAverages:
    """The averages of one layer, which are replaced and never written.

    counts: int64 `[4, q_heads]`, how often each of MEASURES was seen; averages: float32 `[4, q_heads]`.
    """

    counts: Int64
    averages: Float32


class Statistics:
    """Exponential averages over the observed queries of one segment. Thread-safe.

    version: the number of observations so far.
    """

    def __init__(self) -> None:
        self.version = 0
        self._layers: dict[int, LayerAverages] = {}
        self._probed: dict[int, int] = {}
        self._lock = Lock()

    def observe(self, layer: int, one: Observation) -> None:
        """Add the observation of one query of a layer."""
        with self._lock:
            state = self._layers.get(layer)
            if state is None:
                state = LayerAverages(np.zeros(one.values.shape, np.int64), np.zeros(one.values.shape, np.float32))
            counts = state.counts + (1 if one.seen is None else one.seen)
            weights = _WEIGHTS[np.minimum(counts, MEMORY)]
            if one.seen is not None:
                weights *= one.seen
            averages = state.averages + weights * (one.values - state.averages)
            self._layers[layer] = LayerAverages(counts, averages)
            self.version += 1

    def of(self, layer: int) -> LayerStatistics | None:
        """One layer as it is now; None before anything was observed."""
        state = self._layers.get(layer)
        if state is None:
            return None
        state.counts.flags.writeable = state.averages.flags.writeable = False
        retrieved, dense, _, _ = state.averages
        return LayerStatistics(state.counts[0], retrieved, dense)

    def layers(self) -> dict[int, LayerAverages]:
        """Every layer with observations, as it is now."""
        with self._lock:
            return dict(self._layers)

    def restore(self, layers: dict[int, LayerAverages]) -> None:
        """Begin with what `layers` returned of an earlier database, unless something was observed already."""
        with self._lock:
            if not self._layers:
                self._layers = dict(layers)
                self.version += 1

    def mark_probed(self, layer: int, queries: int) -> None:
        """Remember that a layer was probed, to see what its queries retrieve now, when the segment had been queried `queries`
        times."""
        self._probed[layer] = queries

    def probed_at(self, layer: int) -> int:
        """How often the segment had been queried when the layer was last probed."""
        return self._probed.get(layer, 0)

    def of_segment(self, number: int, tokens: int, heads: Sequence[int], evidence: Evidence | None = None) -> SegmentStatistics:
        """Every layer as it is now, for the segment of that number and length. heads: the query heads of each layer. evidence: of
        the segment, None for none."""
        shape = len(heads), max(heads)
        queries = np.zeros(shape, np.int64)
        averages = np.zeros((len(MEASURES), *shape), np.float32)
        for layer, state in self.layers().items():
            queries[layer, : heads[layer]], averages[:, layer, : heads[layer]] = state.counts[0], state.averages
        queries.flags.writeable = averages.flags.writeable = False
        audited = audited_errors(evidence or Evidence(), heads)
        return SegmentStatistics(number, tokens, queries, *(*averages, *audited))
