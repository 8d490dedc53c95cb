"""Which segments have copies of their blocks on the GPU. What is in use stays; what nobody uses makes room, the oldest first."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING

from kvdb.catalog.segment import Segment
from kvdb.errors import CapacityError, GpuLost, IntegrityError, Unavailable
from kvdb.storage.loader import Loader
from kvdb.storage.tier import Blocks

if TYPE_CHECKING:
    from kvdb.storage.gpu import GpuTier

log = logging.getLogger(__name__)
WORTH_BLOCKS = 4
"""Fewer of a segment's last blocks are not worth copies."""
TAILS = 16
"""One slot of so many is left to the sessions' own tokens."""


@dataclass(frozen=True, eq=False)
class Mirror:
    """Copies of the last blocks of a segment, in every layer, in the memory of a GPU.

    first: the block that the copies begin with. slots: int64 `[layers, blocks]`, of the tier.
    """

    segment: Segment
    first: int
    slots: Blocks

    def token(self) -> int:
        """The first that has a copy."""
        return self.first * self.segment.tables[0].layout.block_size


Fill = Callable[["GpuTier", Mirror], None]
"""Copies the blocks in; when it returns they are there, and queries may read them. Raises CapacityError or GpuLost."""


class Mirrors:
    """The copies of one database. Thread-safe. version: changes with what is there, so that plans are made anew.

    Sessions read the mirrors of segments that they hold open, so only those that no session holds are given up. fill: runs in a
    thread of its own, one segment at a time, so that queries never wait for copies.
    """

    def __init__(self, loader: Loader, fill: Fill) -> None:
        self.version = 0
        self._loader = loader
        self._fill = fill
        self._ready: OrderedDict[int, tuple[GpuTier, Mirror]] = OrderedDict()  # by segment number, the last used last
        self._coming: set[int] = set()
        self._filling: tuple[GpuTier, Blocks] | None = None
        self._executor = ThreadPoolExecutor(1, "kvdb-gpu")
        self._closed = False
        self._changed = Condition()

    def of(self, segment: Segment) -> Mirror | None:
        """The copies of a segment that the caller's session holds open, None before there are any."""
        with self._changed:
            found = self._ready.get(segment.number)
            if found is None:
                return None
            self._ready.move_to_end(segment.number)
            return found[1]

    def keep(self, tier: "GpuTier", segment: Segment, *, whole: bool = False) -> None:
        """Copy a segment's blocks in the background, or as many of its last as there is room for. whole: all of them or none.
        The caller holds a reference to the segment."""
        with self._changed:
            number = segment.number
            if self._closed or number in self._ready or number in self._coming or not self._has_room(tier, segment, whole):
                return
            self._coming.add(number)
            segment.retain()
            self._executor.submit(self._copy, tier, segment, whole)

    def take(self, tier: "GpuTier", count: int) -> Blocks:
        """Slots for a session's own tokens; copies that nobody uses make room. Raises CapacityError or GpuLost."""
        with self._changed:
            self._make_room(tier, count)
            return tier.allocate(count)

    def owned(self) -> list[tuple["GpuTier", Blocks]]:
        """The slots of every mirror that is there, or is being filled, and their tier."""
        with self._changed:
            there = [(tier, mirror.slots.ravel()) for tier, mirror in self._ready.values()]
            return there if self._filling is None else [*there, self._filling]

    def settle(self) -> None:
        """Wait until nothing is being copied."""
        with self._changed:
            self._changed.wait_for(lambda: not self._coming)

    def forget(self) -> None:
        """The device is lost, and all copies with it."""
        with self._changed:
            self._closed = True
            self._give_back()
            self.version += 1

    def close(self) -> None:
        """Stop after the segment under way, and give every slot back."""
        with self._changed:
            self._closed = True
        self._executor.shutdown(cancel_futures=False)
        with self._changed:
            self._give_back()

    def _copy(self, tier: "GpuTier", segment: Segment, whole: bool) -> None:
        """In the thread."""
        with ExitStack() as after:
            after.callback(self._ended, segment)
            after.push(self._died)
            after.callback(segment.release)
            if self._closed or segment.references < 2:  # nobody else holds it any more
                return
            try:
                segment.pin(self._loader)
                after.callback(segment.unpin)
                self._come_in(tier, segment, whole)
            except (CapacityError, GpuLost, IntegrityError, Unavailable) as error:
                log.warning("segment %d is not copied to the GPU: %s", segment.number, error)

    def _come_in(self, tier: "GpuTier", segment: Segment, whole: bool) -> None:
        layers, blocks = len(segment.tables), segment.tables[0].layout.blocks_for(len(segment))
        with self._changed:
            self._make_room(tier, layers * blocks + _reserve(tier))
            count = min(blocks, (tier.free - _reserve(tier)) // layers)
            if count < blocks and (whole or count < WORTH_BLOCKS):
                return
            slots = tier.allocate(layers * count)
            self._filling = tier, slots
        mirror = Mirror(segment, blocks - count, slots.reshape(layers, count))
        with ExitStack() as after:
            after.callback(self._filled, tier, slots)
            self._fill(tier, mirror)
            with self._changed:
                if not self._closed:
                    self._ready[segment.number] = tier, mirror
                    self.version += 1

    def _filled(self, tier: "GpuTier", slots: Blocks) -> None:
        """They belong to a mirror that is ready, or to nobody."""
        with self._changed:
            self._filling = None
            if not any(mirror.slots.base is slots for _, mirror in self._ready.values()):
                tier.release(slots)

    def _has_room(self, tier: "GpuTier", segment: Segment, whole: bool) -> bool:
        """With the lock held: whether there is enough that is free, or that nobody uses."""
        unused = (m.slots.size for held, m in self._ready.values() if held is tier and not m.segment.use.sessions)
        blocks = segment.tables[0].layout.blocks_for(len(segment))
        room = (tier.free + sum(unused) - _reserve(tier)) // len(segment.tables)
        return room >= (blocks if whole else min(blocks, WORTH_BLOCKS))

    def _give_back(self) -> None:
        """With the lock held."""
        for tier, mirror in self._ready.values():
            tier.release(mirror.slots.ravel())
        self._ready.clear()

    def _make_room(self, tier: "GpuTier", count: int) -> None:
        """With the lock held: give up the copies that no session uses, until there is room or none are left."""
        for number in list(self._ready):
            if tier.free >= count:
                return
            held, mirror = self._ready[number]
            if held is tier and not mirror.segment.use.sessions:
                del self._ready[number]
                tier.release(mirror.slots.ravel())
                self.version += 1

    def _died(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Whatever else a copy raises is a bug, of which nobody hears who waits for queries alone."""
        if error is not None:
            log.error("copying to the GPU has died; nothing more is copied", exc_info=error)
            self._closed = True

    def _ended(self, segment: Segment) -> None:
        with self._changed:
            self._coming.discard(segment.number)
            self._changed.notify_all()


def _reserve(tier: "GpuTier") -> int:
    """Slots that no segment takes."""
    return tier.slots // TAILS
