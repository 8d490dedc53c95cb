"""The buffer pool: segments that do not fit into main memory as a whole come in when they are asked for.

A layer that is read whole comes in as a whole: of the others those go first that are expected to be used last
(`kvdb.storage.next_use`). Of a layer that is searched come the pages that native code asks for, for which pages of other layers
go by a clock (`_native.PagePool`). Where a selector scored the tokens, the best share of each layer's blocks stays until nothing
else is left that could go. A layer is pinned while it is used, and nothing of it goes meanwhile. What goes is never written,
because a segment never changes and its file holds it already.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from threading import Condition

import kvdb._native as _native
from kvdb.errors import CapacityError, IntegrityError, KvdbError, Unavailable
from kvdb.events import Events, Kind
from kvdb.storage.budget import CpuBudget
from kvdb.storage.page_room import PageRoom
from kvdb.storage.paged import PagedTier
from kvdb.storage.paged_segment import PagedLayer, PagedSegment

log = logging.getLogger(__name__)


class BufferPool:
    """The paged layers of one database, in the part of its budget that is left for them. Thread-safe.

    A call pins all layers that it reads at once or none, and waits for none while it holds others, so that no two calls wait for
    each other. lock: the lock of the budget, because tiers that lack room take back what the pool does not use.
    """

    def __init__(self, budget: CpuBudget, share: float = 0.0) -> None:
        """share: see `Pool.share`."""
        self.share = share
        self._tiers: dict[int, PagedTier] = {}
        self.pages = _native.PagePool()
        self._segments: set[PagedSegment] = set()
        self._room = PageRoom(budget, self.pages)
        self.events = Events()
        self._now = 0
        self._closed = False
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
            return self._tiers.setdefault(block_nbytes, PagedTier(block_nbytes, self._room.budget))

    def open(self, segment: PagedSegment) -> None:
        """See `Pool.open`."""
        with self._changed:
            self._check_open()
            self._room.reserve(segment, max(layer.nbytes for layer in segment.layers))
            self._segments.add(segment)

    def close(self, segment: PagedSegment) -> None:
        """See `Pool.close`."""
        with self._changed:
            self._room.reserve(segment, 0)

    def drop(self, segment: PagedSegment) -> None:
        """See `Pool.drop`."""
        with self._changed:
            self._changed.wait_for(lambda: not any(layer.loading for layer in segment.layers))
            self._segments.discard(segment)
            segment.leave()
            self._room.reserve(segment, 0)

    def pin(self, layers: Sequence[PagedLayer]) -> None:
        """See `Pool.pin`."""
        pages = [layer.opened() for layer in layers]
        with self._changed:
            while True:
                self._take_room(layers)
                for one in pages:
                    one.pin()  # so that none makes room for another
                missing = self._missing(layers)
                if self._begin(missing):
                    break
                for one in pages:
                    one.unpin()
            self._note_use(layers)
            self._read_ahead([layer.next for layer in layers if layer.next not in layers])
        with ExitStack() as undo:
            undo.callback(self.unpin, layers)
            self._read(missing)
            self._wait(layers)
            undo.pop_all()

    def use(self, layers: Sequence[PagedLayer]) -> None:
        """See `Pool.use`."""
        pages = [layer.opened() for layer in layers]
        with self._changed:
            self._check_open()
            self._room.spread(sum(one.missing_nbytes for one in pages))
            for one in pages:
                one.pin()
            self._note_use(layers)

    def unpin(self, layers: Sequence[PagedLayer]) -> None:
        """See `Pool.unpin`."""
        with self._changed:
            for layer in layers:
                assert layer.pins > 0, "an unpinned layer was unpinned"
                layer.pins -= 1
                layer.opened().unpin()
            if not any(layer.pins or layer.loading for layer in self._layers()):
                self._room.settle()  # what searches could have taken
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
            missing = sum(layer.opened().missing_nbytes for layer in layers if not layer.loading)
            if not missing or self._make_room(missing, layers):
                return
            if not any((layer.pins or layer.loading) and layer not in layers for layer in self._layers()):
                raise CapacityError(
                    f"{missing:,} bytes of one layer have to be read from disk, and the {self._room.taken:,} that there are for "
                    f"such layers of storage.cpu_bytes_max={self._room.budget.limit} are in use; drop contexts, close sessions "
                    "or raise the budget"
                )
            self._changed.wait()

    def _make_room(self, nbytes: int, keep: Sequence[PagedLayer], *, ahead: bool = False) -> bool:
        """Whether `nbytes` more may be filled, after layers that are expected later have gone. keep: those that stay anyway.
        ahead: whether the bytes are only read ahead."""
        short = self._room.shortage(nbytes)
        if short <= 0:
            return True
        evictable = [layer for layer in self._layers() if layer.held_nbytes and self._idle(layer) and layer not in keep]
        evictable.sort(key=lambda layer: layer.use.expected(self._now), reverse=True)
        victims: list[tuple[PagedLayer, bool]] = []
        rest, best = [(layer, False) for layer in evictable], [(layer, True) for layer in evictable]
        for layer, preferred_too in rest if ahead else rest + best:
            if short <= 0 or (ahead and layer.use.wanted):
                break
            victims.append((layer, preferred_too))
            short -= layer.preferred_nbytes if preferred_too else layer.held_nbytes - layer.preferred_nbytes
        if short > 0:
            return False
        self._evict(victims)
        return True

    def _begin(self, layers: Sequence[PagedLayer]) -> bool:
        """Take the room of layers that are read whole from now on; called with the lock held. False where it has gone, because
        searches have brought pages meanwhile."""
        try:
            self._room.settle(sum(layer.opened().missing_nbytes for layer in layers))
        except CapacityError:
            return False
        begun: list[PagedLayer] = []
        for layer in layers:
            if not layer.opened().take_all():
                break
            layer.opened().pin()  # until it is noted that it is there
            layer.loading, layer.error = True, None
            begun.append(layer)
        if len(begun) < len(layers):
            for layer in begun:
                layer.loading = False
                layer.opened().unpin()
                layer.opened().give_up()
        return len(begun) == len(layers)

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
                    if isinstance(failure, IntegrityError):
                        self.events.tell(Kind.CHECKSUM_FAILED, what=str(failure))
                self._ended(left.pop(0), error)
        finally:
            for layer in left:
                self._ended(layer, Unavailable("the reading of a layer was broken off; ask again"))

    def _ended(self, layer: PagedLayer, error: KvdbError | None) -> None:
        """Note that a layer was read, or why not."""
        with self._changed:
            layer.loading, layer.error = False, error
            layer.opened().unpin()
            if error is not None:
                layer.opened().give_up()
                self._room.settle()
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
        absent = self._missing(layers)
        nbytes = sum(layer.opened().missing_nbytes for layer in absent)
        if not absent or self._closed or not self._make_room(nbytes, layers, ahead=True) or not self._begin(absent):
            return
        try:
            reading = self._executor.submit(self._read, absent)
        except RuntimeError:  # the interpreter ends
            self._read(absent)
            return
        for layer in absent:
            layer.use.wanted = True
        reading.add_done_callback(_log_death)

    def _evict(self, victims: Sequence[tuple[PagedLayer, bool]]) -> None:
        """Free the memory of layers that nobody reads, and whether that of their best blocks, too; called with the lock held."""
        for layer, preferred_too in victims:
            layer.use.wanted = False
            layer.opened().discard(preferred_too)
        self._room.settle()

    def _trim(self, nbytes: int) -> None:
        """Free pages of layers that nobody reads, but for what is reserved, because the budget has no room left; with the lock
        held."""
        if not self._room.taking:
            self.pages.shrink(min(nbytes, self.pages.nbytes - self._room.reserved))
            self._room.settle()

    def _layers(self) -> Iterator[PagedLayer]:
        return (layer for segment in self._segments for layer in segment.layers)

    @staticmethod
    def _idle(layer: PagedLayer) -> bool:
        return not (layer.pins or layer.loading)

    @staticmethod
    def _missing(layers: Sequence[PagedLayer]) -> list[PagedLayer]:
        return [layer for layer in layers if not (layer.resident or layer.loading)]

    def _note_use(self, layers: Sequence[PagedLayer]) -> None:
        self._now += 1
        for layer in layers:
            layer.pins += 1
            layer.segment.note_use(layer, self._now)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the database was closed while a segment was loaded from disk")


def _log_death(reading: Future[None]) -> None:
    """Say that reading ahead died of a bug of ours, which nobody else would learn of."""
    error = reading.exception()
    if error is not None:
        log.error("reading ahead has died", exc_info=error)
