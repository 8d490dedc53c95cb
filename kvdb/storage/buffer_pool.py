"""The buffer pool: layers of segments that do not fit into main memory as a whole come in when they are asked for.

A layer is pinned while it is read. Pinned layers stay; of the others those go first that are expected to be used last
(`kvdb.storage.next_use`). What goes is never written, because a segment never changes and its file holds it already.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from threading import Condition

from kvdb.errors import CapacityError, KvdbError, Unavailable
from kvdb.storage.budget import CpuBudget
from kvdb.storage.paged import PagedTier
from kvdb.storage.paged_segment import PagedLayer, PagedSegment

log = logging.getLogger(__name__)


class BufferPool:
    """The paged layers of one database, in the part of its budget that is left for them. Thread-safe.

    A call pins all layers that it reads at once or none, and waits for none while it holds others, so that no two calls wait for
    each other. lock: the lock of the budget, because tiers that lack room take back what the pool does not use.
    """

    def __init__(self, budget: CpuBudget) -> None:
        self._budget = budget
        self._tiers: dict[int, PagedTier] = {}
        self._layers: set[PagedLayer] = set()  # those that take memory: resident, or being read
        self._reserved = self._resident = self._taken = 0
        self._now = 0
        self._taking = self._closed = False
        self._executor = ThreadPoolExecutor(1, "kvdb-load-ahead")
        self._changed = Condition(budget.lock)
        budget.register(self._trim)

    @property
    def tiers(self) -> list[PagedTier]:
        """The tiers of its blocks, one for each size."""
        with self._changed:
            return list(self._tiers.values())

    def tier(self, block_nbytes: int) -> PagedTier:
        """The tier for blocks of that size."""
        with self._changed:
            return self._tiers.setdefault(block_nbytes, PagedTier(block_nbytes, self._budget))

    def open(self, segment: PagedSegment) -> None:
        """See `Pool.open`."""
        with self._changed:
            self._check_open()
            self._reserve(segment, max(layer.nbytes for layer in segment.layers))

    def close(self, segment: PagedSegment) -> None:
        """See `Pool.close`."""
        with self._changed:
            self._reserve(segment, 0)

    def drop(self, segment: PagedSegment) -> None:
        """See `Pool.drop`."""
        with self._changed:
            self._changed.wait_for(lambda: not any(layer.loading for layer in segment.layers))
            self._reserve(segment, 0)
            self._evict([layer for layer in segment.layers if layer.resident])
        segment.leave()

    def pin(self, layers: Sequence[PagedLayer]) -> None:
        """See `Pool.pin`."""
        with self._changed:
            self._take_room(layers)
            missing = [layer for layer in layers if not (layer.resident or layer.loading)]
            self._begin(missing)
            self._now += 1
            for layer in layers:
                layer.pins += 1
                layer.segment.note_use(layer, self._now)
            self._read_ahead([layer.next for layer in layers if layer.next not in layers])
        with ExitStack() as undo:
            undo.callback(self.unpin, layers)
            self._read(missing)
            self._wait(layers)
            undo.pop_all()

    def unpin(self, layers: Sequence[PagedLayer]) -> None:
        """See `Pool.unpin`."""
        with self._changed:
            for layer in layers:
                assert layer.pins > 0, "an unpinned layer was unpinned"
                layer.pins -= 1
            self._changed.notify_all()

    def shut_down(self) -> None:
        """End waiting for memory and reading ahead. Doing so twice does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._executor.shutdown()

    def _take_room(self, layers: Sequence[PagedLayer]) -> None:
        """Make room for those of the layers that take none yet; called with the lock held, which is given up while it waits."""
        while True:
            self._check_open()
            missing = sum(layer.nbytes for layer in layers if not (layer.resident or layer.loading))
            if not missing or self._make_room(missing, layers):
                return
            if not any((layer.pins or layer.loading) and layer not in layers for layer in self._layers):
                raise CapacityError(
                    f"{missing:,} bytes of one layer have to be read from disk, and the {self._taken:,} that there are for such "
                    f"layers of storage.cpu_bytes_max={self._budget.limit} are in use; drop contexts, close sessions or raise "
                    "the budget"
                )
            self._changed.wait()

    def _make_room(self, nbytes: int, keep: Sequence[PagedLayer], *, ahead: bool = False) -> bool:
        """Whether `nbytes` more may be filled, after layers that are expected later have gone. keep: those that stay anyway.
        ahead: whether the bytes are only read ahead."""
        short = self._shortage(nbytes)
        if short <= 0:
            return True
        victims = []
        evictable = [layer for layer in self._layers if layer.resident and not layer.pins and layer not in keep]
        for layer in sorted(evictable, key=lambda layer: layer.use.expected(self._now), reverse=True):
            if short <= 0 or (ahead and layer.use.wanted):
                break
            victims.append(layer)
            short -= layer.nbytes
        if short > 0:
            return False
        self._evict(victims)
        return True

    def _shortage(self, nbytes: int) -> int:
        """How many bytes are missing for `nbytes` more, where layers only go from the pool itself."""
        more = max(self._reserved, self._resident + nbytes) - self._taken
        if more <= 0 or self._budget.left is None:
            return 0
        self._taking = True
        try:
            self._budget.check(more)
        except CapacityError:
            return more - self._budget.left
        finally:
            self._taking = False
        return 0

    def _begin(self, layers: Sequence[PagedLayer]) -> None:
        """Take the room of layers that are read from now on; called with the lock held."""
        for layer in layers:
            layer.loading, layer.error = True, None
            self.tier(layer.table.layout.nbytes).fill(layer.table.blocks)
            self._layers.add(layer)
            self._resident += layer.nbytes
        self._settle()

    def _read(self, layers: Sequence[PagedLayer]) -> None:
        """Read layers that have begun; what goes wrong is kept in them."""
        left = list(layers)
        try:
            while left:
                error: KvdbError | None = None
                try:
                    left[0].read()
                except KvdbError as failure:
                    error = failure
                self._ended(left.pop(0), error)
        finally:
            for layer in left:
                self._ended(layer, Unavailable("the reading of a layer was broken off; ask again"))

    def _ended(self, layer: PagedLayer, error: KvdbError | None) -> None:
        """Note that a layer was read, or why not."""
        with self._changed:
            layer.loading, layer.resident, layer.error = False, True, error
            if error is not None:
                self._evict([layer])
            self._changed.notify_all()

    def _wait(self, layers: Sequence[PagedLayer]) -> None:
        """Wait until layers that others read are there. Raises what reading one of them raised."""
        with self._changed:
            self._changed.wait_for(lambda: not any(layer.loading for layer in layers))
            for error in [layer.error for layer in layers if not layer.resident]:
                assert error is not None
                raise type(error)(str(error)) from None

    def _read_ahead(self, layers: Sequence[PagedLayer]) -> None:
        """Begin to read layers in the background, if there is room without those that are wanted as soon; with the lock held."""
        absent = [layer for layer in layers if not (layer.resident or layer.loading)]
        nbytes = sum(layer.nbytes for layer in absent)
        if not absent or self._closed or not self._make_room(nbytes, layers, ahead=True):
            return
        try:
            reading = self._executor.submit(self._read, absent)
        except RuntimeError:  # the interpreter ends
            return
        self._begin(absent)
        for layer in absent:
            layer.use.wanted = True
        reading.add_done_callback(_log_death)

    def _evict(self, layers: Sequence[PagedLayer]) -> None:
        """Free the memory of layers that nobody reads; called with the lock held."""
        for layer in layers:
            layer.resident = layer.use.wanted = False
            self._layers.remove(layer)
            self._resident -= layer.nbytes
            self.tier(layer.table.layout.nbytes).discard(layer.table.blocks)
        self._settle()

    def _reserve(self, segment: PagedSegment, nbytes: int) -> None:
        """Set how much is reserved for a segment. Raises CapacityError, and then it is as before."""
        before = segment.reserved
        self._reserved += nbytes - before
        segment.reserved = nbytes
        try:
            self._settle()
        except CapacityError:
            self._reserved -= nbytes - before
            segment.reserved = before
            raise

    def _settle(self) -> None:
        """Take of the budget what is reserved or filled, and give back the rest. Raises CapacityError."""
        more = max(self._reserved, self._resident) - self._taken
        self._taking = True
        try:
            if more > 0:
                self._budget.take(more)
            else:
                self._budget.give(-more)
        finally:
            self._taking = False
        self._taken += more

    def _trim(self) -> None:
        """Free layers that nobody reads, but for what is reserved, because the budget has no room left; with the lock held."""
        idle = [layer for layer in self._layers if layer.resident and not layer.pins]
        if not self._taking and self._resident > self._reserved:
            self._evict(idle)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the database was closed while a segment was loaded from disk")


def _log_death(reading: Future[None]) -> None:
    """Say that reading ahead died of a bug of ours, which nobody else would learn of."""
    error = reading.exception()
    if error is not None:
        log.error("reading ahead has died", exc_info=error)
