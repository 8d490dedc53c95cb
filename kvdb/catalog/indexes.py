"""The indexes of one segment, by layer and kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

from indexes.base import Float32, Index


@dataclass(frozen=True)
class Progress:
    """How far one kind is. state: "waiting", "building", "ready" or "failed". share: of all layers, 0 to 1. seconds: spent so
    far, of seconds_expected in all. error: why it failed."""

    state: str
    share: float = 0.0
    seconds: float = 0.0
    seconds_expected: float = 0.0
    error: str = ""


class IndexSet:
    """What is built over a segment so far. Layers appear one by one while sessions read. Thread-safe.

    samples: float32 `[q_heads, m, head_dim]` by layer, queries that were asked of these keys, for kinds that learn from some.
    progress: of each kind that somebody began to build; written by who builds.
    """

    def __init__(self, samples: Mapping[int, Float32] | None = None) -> None:
        self.samples = dict(samples or {})
        self.version = 0
        self.progress: dict[str, Progress] = {}
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

    def clear(self) -> None:
        """Forget every index; what was built was built over blocks that go now."""
        with self._lock:
            self._layers = {}
            self.progress = {kind: progress for kind, progress in self.progress.items() if progress.state == "failed"}
            self.version += 1

    def under_way(self) -> tuple[str, ...]:
        """Kinds that are being built, or wait for it; others may come and go meanwhile."""
        return tuple(kind for kind, progress in list(self.progress.items()) if progress.state in {"waiting", "building"})

    @property
    def nbytes(self) -> int:
        """What all of them keep."""
        return sum(index.nbytes for indexes in self.built().values() for index in indexes)

    def built(self) -> Mapping[str, list[Index]]:
        """Every index by kind, in the order of the layers."""
        kinds: dict[str, list[Index]] = {}
        with self._lock:
            for number in sorted(self._layers):
                for kind, index in self._layers[number].items():
                    kinds.setdefault(kind, []).append(index)
        return kinds
