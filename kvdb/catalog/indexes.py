"""The indexes of one segment, by layer and kind."""

from collections.abc import Mapping
from threading import Lock

from indexes.base import Float32, Index


class IndexSet:
    """What is built over a segment so far. Layers appear one by one while sessions read. Thread-safe.

    samples: float32 `[q_heads, m, head_dim]` by layer, queries that were asked of these keys, for kinds that learn from some.
    """

    def __init__(self, samples: Mapping[int, Float32] | None = None) -> None:
        self.samples = dict(samples or {})
        self.version = 0
        self._layers: dict[int, dict[str, Index]] = {}
        self._lock = Lock()

    def of(self, layer: int) -> Mapping[str, Index]:
        """The indexes of one layer by kind."""
        return self._layers.get(layer, {})

    def put(self, layer: int, index: Index) -> None:
        """Offer an index to every query from now on."""
        with self._lock:
            self._layers[layer] = {**self.of(layer), index.kind: index}
            self.version += 1

    def built(self) -> Mapping[str, list[Index]]:
        """Every index by kind, in the order of the layers."""
        kinds: dict[str, list[Index]] = {}
        with self._lock:
            for number in sorted(self._layers):
                for kind, index in self._layers[number].items():
                    kinds.setdefault(kind, []).append(index)
        return kinds
