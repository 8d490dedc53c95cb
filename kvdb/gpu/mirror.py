"""The copies of segments on the GPU. Copies in use stay; unused ones make room, the least recently used first."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING

from kvdb.catalog.segments.segment import Segment
from kvdb.errors import CapacityError, GpuLost, IntegrityError, Unavailable
from kvdb.storage.loader import Loader
from kvdb.storage.tier import Blocks

if TYPE_CHECKING:
    from kvdb.storage.gpu import GpuTier

log = logging.getLogger(__name__)
WORTH_BLOCKS = 4
"""The fewest of a segment's last blocks that are worth copying."""
TAIL_SHARE = 16
"""One slot in so many is kept free of segments, for the tails of sessions."""


@dataclass(frozen=True, eq=False)
class Mirror:
    """Copies of the last blocks of a segment, in every layer, in the memory of a GPU.

    first: number of the first copied block. slots: int64 `[layers, blocks]`, of the tier.
    """

    segment: Segment
    first: int
    slots: Blocks

    @property
    def first_token(self) -> int:
        """Number of the first copied token."""
        return self.first * self.segment.tables[0].layout.block_size


Upload = Callable[["GpuTier", Mirror], None]
"""Fills the slots of a mirror, and returns when queries may read them. Raises CapacityError, GpuLost, IntegrityError or
Unavailable."""


class Mirrors:
    """The mirrors of one database. Thread-safe. version: changes whenever mirrors appear or go, so that plans are made anew.

    Sessions read the mirrors of the segments that they hold open, so only mirrors of segments that no session holds are evicted.
    `upload` runs in a thread of its own, one segment at a time, so that queries never wait for copies.
    """

    def __init__(self, loader: Loader, upload: Upload) -> None:
        self.version = 0
        self._loader = loader
        self._upload = upload
        self._ready: OrderedDict[int, tuple[GpuTier, Mirror]] = OrderedDict()  # by segment number, the last used last
        self._pending: dict[int, Segment] = {}  # by number; each is held until it is copied
        self._uploading: tuple[GpuTier, Blocks] | None = None
        self._executor = ThreadPoolExecutor(1, "kvdb-gpu")
        self._closed = False
        self._changed = Condition()

    def get(self, segment: Segment) -> Mirror | None:
        """The mirror of a segment that the caller's session holds open; None before there is one."""
        with self._changed:
            entry = self._ready.get(segment.number)
            if entry is None:
                return None
            self._ready.move_to_end(segment.number)
            return entry[1]

    def prefetch(self, tier: "GpuTier", segment: Segment, *, whole: bool = False) -> None:
        """Copy a segment's blocks in the background, or as many of its last blocks as there is room for.

        whole: all blocks or none. The caller holds a reference to the segment.
        """
        with self._changed:
            number = segment.number
            if self._closed or number in self._ready or number in self._pending or not self._has_room(tier, segment, whole):
                return
            self._pending[number] = segment
            segment.retain()
            self._executor.submit(self._copy, tier, segment, whole)

    def allocate_tail(self, tier: "GpuTier", count: int) -> Blocks:
        """Slots for the tail of a session. Unused mirrors make room. Raises CapacityError or GpuLost."""
        with self._changed:
            self._evict(tier, count)
            return tier.allocate(count)

    def owned(self) -> list[tuple["GpuTier", Blocks]]:
        """The slots of every mirror, those of the one that is being filled among them, and their tiers."""
        with self._changed:
            ready = [(tier, mirror.slots.ravel()) for tier, mirror in self._ready.values()]
            return ready if self._uploading is None else [*ready, self._uploading]

    def held_segments(self) -> list[Segment]:
        """The segments that are held to be copied."""
        with self._changed:
            return list(self._pending.values())

    def wait_idle(self) -> None:
        """Wait until nothing is being copied."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def drop_all(self) -> None:
        """Release all mirrors and make no more, because the device is lost."""
        with self._changed:
            self._closed = True
            self._release_all()
            self.version += 1

    def close(self) -> None:
        """Stop after the segment that is being copied, and give every slot back."""
        with self._changed:
            self._closed = True
        self._executor.shutdown(cancel_futures=False)
        with self._changed:
            self._release_all()

    def _copy(self, tier: "GpuTier", segment: Segment, whole: bool) -> None:
        """Copy a segment. Runs in the executor's thread."""
        with ExitStack() as after:
            after.callback(self._finished, segment)
            after.push(self._report_bug)
            after.callback(segment.release)
            if self._closed or segment.references < 2:  # nobody else holds it any more
                return
            try:
                segment.pin(self._loader)
                after.callback(segment.unpin)
                self._copy_blocks(tier, segment, whole)
            except (CapacityError, GpuLost, IntegrityError, Unavailable) as error:
                log.warning("segment %d is not copied to the GPU: %s", segment.number, error)

    def _copy_blocks(self, tier: "GpuTier", segment: Segment, whole: bool) -> None:
        layers, blocks = len(segment.tables), segment.tables[0].layout.blocks_for(len(segment))
        with self._changed:
            self._evict(tier, layers * blocks + _reserve(tier))
            count = min(blocks, (tier.free - _reserve(tier)) // layers)
            if count < blocks and (whole or count < WORTH_BLOCKS):
                return
            slots = tier.allocate(layers * count)
            self._uploading = tier, slots
        mirror = Mirror(segment, blocks - count, slots.reshape(layers, count))
        with ExitStack() as after:
            after.callback(self._uploaded, tier, slots)
            self._upload(tier, mirror)
            with self._changed:
                if not self._closed:
                    self._ready[segment.number] = tier, mirror
                    self.version += 1

    def _uploaded(self, tier: "GpuTier", slots: Blocks) -> None:
        """Release the slots unless a ready mirror owns them now."""
        with self._changed:
            self._uploading = None
            if not any(mirror.slots.base is slots for _, mirror in self._ready.values()):
                tier.release(slots)

    def _has_room(self, tier: "GpuTier", segment: Segment, whole: bool) -> bool:
        """Whether free slots and those of unused mirrors suffice. The caller holds the lock."""
        unused = (m.slots.size for held, m in self._ready.values() if held is tier and not m.segment.usage.sessions)
        blocks = segment.tables[0].layout.blocks_for(len(segment))
        room = (tier.free + sum(unused) - _reserve(tier)) // len(segment.tables)
        return room >= (blocks if whole else min(blocks, WORTH_BLOCKS))

    def _release_all(self) -> None:
        """Release the slots of all mirrors. The caller holds the lock."""
        for tier, mirror in self._ready.values():
            tier.release(mirror.slots.ravel())
        self._ready.clear()

    def _evict(self, tier: "GpuTier", count: int) -> None:
        """Evict unused mirrors until `count` slots are free or none are left. The caller holds the lock."""
        for number in list(self._ready):
            if tier.free >= count:
                return
            held, mirror = self._ready[number]
            if held is tier and not mirror.segment.usage.sessions:
                del self._ready[number]
                tier.release(mirror.slots.ravel())
                self.version += 1

    def _report_bug(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Log any other error of a copy. It is a bug, and nobody waits for the result who would see it."""
        if error is not None:
            log.error("copying to the GPU failed with a bug; nothing more is copied", exc_info=error)
            self._closed = True

    def _finished(self, segment: Segment) -> None:
        with self._changed:
            self._pending.pop(segment.number, None)
            self._changed.notify_all()


def _reserve(tier: "GpuTier") -> int:
    """Slots that stay free of segments."""
    return tier.slots // TAIL_SHARE
