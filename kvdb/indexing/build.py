"""One build of a kind of index over one segment: its steps, and its hold on the segment meanwhile."""

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import ExitStack
from time import perf_counter

import indexes.registry as registry
import kvdb.catalog.segments.index_files as index_files
from indexes.accelerate import Accelerator
from indexes.base import Index
from kvdb.catalog.segments.segment import Segment
from kvdb.errors import CapacityError, Unavailable, Unsupported
from kvdb.storage.loader import Loader


class Build:
    """The build of one kind of index over one segment. It holds the segment, and its blocks in main memory, from its first step
    on; a build that waits for its first step keeps nothing alive.

    layers: the layers without an index, the first of which is being built. requested: whether somebody asked for it; such builds
    come before those that would merely pay. seconds: the time spent on finished layers. layer_seconds: the time spent on the
    layer under way, of which `share` is done. step_seconds: what its last step took beside steps of sessions.
    """

    def __init__(self, segment: Segment, kind: str, *, requested: bool) -> None:
        self.segment = segment
        self.kind = kind
        self.requested = requested
        self.layers = deque(missing_layers(segment, kind))
        self.future: Future[None] = Future()
        self.steps: Generator[float, None, Index] | None = None
        self._layer = ExitStack()  # holds the layer that is being built, until its index is kept
        self.running = self.holds_segment = False
        self.seconds = self.layer_seconds = self.share = self.step_seconds = 0.0

    @property
    def key(self) -> tuple[int, str]:
        return self.segment.number, self.kind

    def acquire(self, loader: Loader) -> None:
        """Hold the segment until `release`. Raises Unavailable where it is freed already, or cannot come in from disk."""
        if self.holds_segment:
            return
        if not self.segment.try_retain():
            raise abandoned()
        try:
            self.segment.pin(loader)
        except (CapacityError, Unavailable) as error:
            self.segment.release()
            raise Unavailable(f"an index cannot be built over a segment that cannot come in from disk: {error}") from None
        self.holds_segment = True
        self.layers = deque(missing_layers(self.segment, self.kind))  # indexes that were there may have gone with the blocks

    def release(self) -> None:
        """Release the segment, and drop the unfinished layer."""
        if self.steps is not None:
            self.steps.close()
        self._layer.close()
        if self.holds_segment:
            self.holds_segment = False
            self.segment.unpin()
            self.segment.release()

    def load(self) -> Index | None:
        """The index of the first layer, if nothing of it is built yet and a file beside the segment's holds it."""
        if self.steps is not None:
            return None
        self._layer.close()
        with self.segment.holding(self.layers[0]):
            keys = self.segment.tables[self.layers[0]].keys(len(self.segment))
            index = index_files.load(self.segment, self.kind, self.layers[0], keys)
        if index is not None:
            self.layers.popleft()
        return index

    def step(self, accelerator: Accelerator | None) -> Index | None:
        """Go on with the first layer. Returns its index once it is built, None before. Raises Unsupported, and whatever the
        kind's build does."""
        layer, started = self.layers[0], perf_counter()
        if self.steps is None:
            self._layer.enter_context(self.segment.holding(layer))
            keys = self.segment.tables[layer].keys(len(self.segment))
            self.steps = registry.build_steps(self.kind, keys, self.segment.indexes.queries.get(layer), accelerator)
        try:
            self.share = next(self.steps)
        except StopIteration as done:
            self.steps, self.share = None, 0.0
            self.layers.popleft()
            index: Index = done.value
            return index
        except ModuleNotFoundError as error:
            raise Unsupported(
                f"an index of the kind {self.kind!r} needs {error.name}, which is not installed; pip install 'kvdb[hnsw]'"
            ) from None
        finally:
            self.layer_seconds += perf_counter() - started
        return None


def missing_layers(segment: Segment, kind: str) -> list[int]:
    """The layers of a segment without an index of that kind, of those that are searched."""
    return [layer for layer in segment.searched if kind not in segment.indexes.of(layer)]


def abandoned() -> Unavailable:
    return Unavailable("nobody holds the segment any more that an index was built over")
