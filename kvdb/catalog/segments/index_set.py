"""The indexes of one segment, by layer and kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

from indexes.base import Float32, Index
from kvdb.catalog.evidence.layer_changes import LayerChanges
from kvdb.catalog.segments.stored_queries import StoredQueries
from kvdb.storage.budget import CpuBudget


@dataclass(frozen=True)
class Progress:
    """The progress of one kind of index over a segment.

    state: "waiting", "building", "ready" or "failed". share: the share of all layers that is done, 0 to 1. seconds: the time
    spent so far. seconds_expected: the time expected in all. error: why it failed.
    """

    state: str
    share: float = 0.0
    seconds: float = 0.0
    seconds_expected: float = 0.0
    error: str = ""


class IndexSet:
    """The indexes over one segment so far. Layers appear one by one while sessions read. Thread-safe.

    changes: of a layer when an index is added, and of all when they are removed; `version` counts all of them.
    """

    def __init__(self, queries: StoredQueries | None = None, budget: CpuBudget | None = None) -> None:
        """queries: some queries of these keys; the set takes them over. budget: where the bytes of indexes count, None where they
        do not."""
        self._queries = queries
        self._budget = budget
        self._taken = 0
        self.changes = LayerChanges()
        self._progress: dict[str, Progress] = {}
        self._layers: dict[int, dict[str, Index]] = {}
        self._lock = Lock()

    @property
    def version(self) -> int:
        return self.changes.version

    @property
    def queries(self) -> Mapping[int, Float32]:
        """Some queries of these keys, for kinds that learn from them: float32 `[q_heads, m, head_dim]` by layer."""
        return {} if self._queries is None else self._queries.by_layer

    @property
    def progress(self) -> Mapping[str, Progress]:
        """The progress of each kind that was requested or scheduled. A mapping never changes; a new one replaces it."""
        return self._progress

    def report(self, kind: str, progress: Progress | None) -> None:
        """Set the progress of a kind; None for one that is no longer requested."""
        with self._lock:
            others = {other: known for other, known in self._progress.items() if other != kind}
            self._progress = others if progress is None else {**others, kind: progress}

    def release(self) -> None:
        """Forget every index and the queries, because the segment is freed."""
        self.clear()
        if self._queries is not None:
            self._queries.release()

    def of(self, layer: int) -> Mapping[str, Index]:
        """The indexes of one layer by kind."""
        return self._layers.get(layer, {})

    def put(self, layer: int, index: Index) -> None:
        """Offer an index to every query from now on. Segments may go to disk for it, but no context is dropped. Raises
        CapacityError where the budget has no room; the caller has locked no segment and no catalogue."""
        if self._budget is not None:
            self._budget.take_for_index(index.nbytes)
        with self._lock:
            before = self.of(layer).get(index.kind)
            self._layers[layer] = {**self.of(layer), index.kind: index}
            self._taken += 0 if self._budget is None else index.nbytes
            self._give(0 if before is None else before.nbytes)
            self.changes.advance(layer)

    def clear(self) -> None:
        """Forget every index, because the blocks that they were built over are freed now."""
        with self._lock:
            self._layers = {}
            self._give(self._taken)
            self._progress = {kind: progress for kind, progress in self._progress.items() if progress.state == "failed"}
            self.changes.advance()

    def _give(self, nbytes: int) -> None:
        """Count bytes of indexes no longer; called with the lock held."""
        given = min(nbytes, self._taken)
        if self._budget is not None and given:
            self._budget.give_beside(given)
            self._taken -= given

    def in_progress(self) -> tuple[str, ...]:
        """The kinds that are being built, or wait to be built."""
        return tuple(kind for kind, progress in self.progress.items() if progress.state in {"waiting", "building"})

    @property
    def kinds(self) -> set[str]:
        """The kinds of which any layer has an index, and those that are being built, or wait to be built."""
        return {*self.built(), *self.in_progress()}

    @property
    def nbytes(self) -> int:
        """The memory of all indexes in bytes."""
        return sum(index.nbytes for indexes in self.built().values() for index in indexes)

    def built(self) -> Mapping[str, list[Index]]:
        """Every index by kind, in the order of the layers."""
        kinds: dict[str, list[Index]] = {}
        with self._lock:
            for number in sorted(self._layers):
                for kind, index in self._layers[number].items():
                    kinds.setdefault(kind, []).append(index)
        return kinds
