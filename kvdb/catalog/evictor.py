"""Room for what is new: the contexts least worth keeping go down a tier, and from the last one they are dropped."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from kvdb.catalog.catalog import Catalog
from kvdb.catalog.contexts.context import StoredContext
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import Views
from kvdb.errors import CapacityError, NotFound, Unavailable
from kvdb.events import Kind
from kvdb.storage.disk import DiskTier
from kvdb.storage.eviction.base import EvictionPolicy, K
from kvdb.storage.eviction.policies import policy
from kvdb.storage.room import InTurn
from kvdb.storage.store import BlockStore

SHARE = 64
"""Room is made for at least this part of a tier at a time, because all that is stored is looked at each time."""
NAMED_MAX = 5
"""How many contexts an error names at most."""
TOO_MUCH = "all that is stored together could not make that room, so nothing was let go"


def open_evictor(catalog: Catalog, blocks: BlockStore, eviction: str) -> None:
    """Have contexts make room in the tiers of a database, by the policy of that name; none does by "none"."""
    segments, contexts = policy(eviction), policy(eviction)
    if segments is not None and contexts is not None:
        Evictor(catalog, blocks, segments, contexts)


class Evictor:
    """Which segments leave main memory, and which contexts are dropped. Thread-safe.

    With a place on disk, segments are offloaded from main memory, and contexts are dropped where the disk is full; without one
    they are dropped from main memory. What is pinned, or read by a session, stays where it is; so does a context whose blocks
    others hold all of, because nothing would become free.
    """

    def __init__(
        self, catalog: Catalog, blocks: BlockStore, segments: EvictionPolicy[Any], contexts: EvictionPolicy[Any]
    ) -> None:
        """segments, contexts: empty ones, over segments and over names of contexts."""
        self._catalog = catalog
        self._blocks = blocks
        self._segments: EvictionPolicy[Segment] = segments
        self._contexts: EvictionPolicy[str] = contexts
        self._named: Counter[Segment] = Counter()  # how many views of stored contexts show it
        self._digests: dict[Segment, str] = {}  # of its model's spec
        self._left_nbytes = 0  # of all segments that left main memory so far
        self._used_at: dict[Segment, int] = {}  # how many that were when it was last used
        self._lock = Lock()
        for context in sorted(catalog.contexts(), key=lambda one: one.life.used):
            self.came(context)
        catalog.watcher = self
        blocks.budget.evict = InTurn(self.make_room)
        if blocks.disk is not None:
            blocks.budget.offload = blocks.budget.evict
            blocks.disk.evict = InTurn(self.make_disk_room)

    def came(self, context: StoredContext) -> None:
        """See `Watcher`."""
        with self._lock:
            for view in context.views:
                self._named[view.segment] += 1
                self._digests[view.segment] = context.spec.digest
        self.used([context], context.views)

    def used(self, contexts: Sequence[StoredContext], views: Views) -> None:
        """See `Watcher`."""
        with self._lock:
            for view in reversed(views):  # what lies deepest goes first
                if self._named[view.segment]:
                    self._used_at[view.segment] = self._left_nbytes
                    self._segments.touch(view.segment, view.segment.nbytes)
            for context in sorted(contexts, key=lambda one: one.layout.length, reverse=True):
                self._contexts.touch(context.name, _last_nbytes(context))

    def went(self, context: StoredContext) -> None:
        """See `Watcher`."""
        with self._lock:
            self._contexts.forget(context.name)
            for view in context.views:
                self._named[view.segment] -= 1
                if not self._named[view.segment]:
                    del self._named[view.segment], self._digests[view.segment]
                    self._used_at.pop(view.segment, None)
                    self._segments.forget(view.segment)

    def make_room(self, nbytes: int) -> str:
        """Free that much main memory, if there is what may go; see `kvdb.storage.room.Evict`."""
        limit = self._blocks.budget.limit
        if limit is not None and nbytes > limit:
            return TOO_MUCH
        nbytes = max(nbytes, (limit or 0) // SHARE)
        try:
            if self._catalog.drop_expired():
                return ""
            if self._blocks.disk is None:
                freed = self._drop(nbytes, lambda segment: segment.nbytes if segment.resident else 0)
            else:
                freed = self._offload(self._blocks.disk, nbytes)
        except (CapacityError, Unavailable) as error:
            return f"and nothing can go to disk: {error}"
        return "" if freed else self._in_the_way()

    def make_disk_room(self, nbytes: int) -> str:
        """Free that much of the disk, if there is what may go; see `kvdb.storage.room.Evict`."""
        limit = self._blocks.disk_bytes_max
        if limit is not None and nbytes > limit:
            return TOO_MUCH
        nbytes = max(nbytes, self._blocks.disk.nbytes // SHARE if self._blocks.disk is not None else 0)
        try:
            if self._catalog.drop_expired():
                return ""
            freed = self._drop(nbytes, lambda segment: segment.nbytes if segment.place else 0)
        except (CapacityError, Unavailable) as error:
            return f"and nothing can be dropped: {error}"
        return "" if freed else self._in_the_way()

    def _offload(self, disk: DiskTier, nbytes: int) -> int:
        """Move segments to disk until that much is free. Returns how much is; raises what `Segment.write` raises."""
        pinned = {view.segment for context in self._catalog.contexts() if context.life.pinned for view in context.views}
        with self._lock:
            for segment in self._named:  # also those that came back without being used
                if segment.whole and segment not in self._segments:
                    self._segments.touch(segment, segment.nbytes)
            kept = {one for one in self._named if one in pinned or one.pins or not one.whole}
            going = _chosen(self._segments, kept | {one for one in self._named if self._is_favoured(one)}, nbytes)
            if (left := nbytes - sum(one.nbytes for one in going)) > 0:
                going += _chosen(self._segments, kept, left)
            self._left_nbytes += sum(one.nbytes for one in going)
            victims = [(segment, self._digests[segment]) for segment in going]
        freed = 0
        for segment, digest in victims:
            if segment.try_retain():
                try:
                    left = segment.offload(disk, digest)
                    freed += left
                    self._catalog.events.tell(Kind.OFFLOADED, segment=segment.number, tokens=len(segment), bytes=left)
                finally:
                    segment.release()
        return freed

    def _is_favoured(self, segment: Segment) -> bool:
        """Whether a segment has indexes in memory that few bytes have left since they were of use: fewer than main memory has.
        Queries ask an index for few of the segment's keys, and bringing both back takes longer than keys and values alone."""
        limit = self._blocks.budget.limit or 0
        return bool(segment.indexes.nbytes) and self._left_nbytes - self._used_at.get(segment, 0) < limit

    def _drop(self, nbytes: int, size: Callable[[Segment], int]) -> int:
        """Drop contexts until that much is free. Returns how much is; raises what dropping a context raises. size: what a segment
        takes of the tier."""
        freed = 0
        while freed < nbytes:
            contexts = {context.name: context for context in self._catalog.contexts()}
            own = {name: _own_nbytes(context, size) for name, context in contexts.items()}
            with self._lock:
                for name in contexts.keys() - {name for name in contexts if name in self._contexts}:  # it could not be dropped
                    self._contexts.touch(name, _last_nbytes(contexts[name]))
                kept = {name for name in contexts if contexts[name].life.pinned or not own[name]}
                victims = _chosen(self._contexts, kept, nbytes - freed)
            if not victims:
                break
            for name in victims:
                with suppress(NotFound):
                    self._catalog.drop(name)
                    freed += own.get(name, 0)
                    self._catalog.events.tell(Kind.EVICTED, context=name, bytes=own.get(name, 0))
        return freed

    def _in_the_way(self) -> str:
        """Words for what may not go."""
        contexts = self._catalog.contexts()
        pinned = [context.name for context in contexts if context.life.pinned]
        used = [one.name for one in contexts if not one.life.pinned and any(view.segment.pins for view in one.views)]
        told = [f"{_names(names)} {what}" for names, what in ((pinned, "pinned"), (used, "in use by sessions")) if names]
        unpin = "; kvdb unpin lets contexts go" if pinned else ""
        again = "" if pinned and not used else "; try again when imports and sessions have ended"
        rest = "what holds the rest are imports and open sessions"
        return f"nothing that is stored can go: {', '.join(told) or rest}{unpin}{again}"


def _chosen(entries: EvictionPolicy[K], kept: Collection[K], nbytes: int) -> list[K]:
    """The entries that go next, of that many bytes together if there are so many, which are no entries from now on; none of
    `kept`."""
    pinned = [key for key in kept if key in entries]
    for key in pinned:
        entries.pin(key)
    left, chosen = max(entries.nbytes - nbytes, 0), list[K]()
    while entries.nbytes > left and (victim := entries.evict()) is not None:
        chosen.append(victim)
    for key in pinned:
        entries.unpin(key)
    return chosen


def _last_nbytes(context: StoredContext) -> int:
    """What a context takes by itself, about, as others share what stands before."""
    return context.views[-1].segment.nbytes if context.views else 1


def _own_nbytes(context: StoredContext, size: Callable[[Segment], int]) -> int:
    """What would be free if a context were dropped: its segments that nobody else holds, and its recomputed tokens."""
    overlaid = 0 if context.overlay is None else context.overlay.nbytes
    views = Counter(view.segment for view in context.views)
    return overlaid + sum(size(segment) for segment, held in views.items() if segment.references == held)


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
    return ", ".join(map(repr, names[:NAMED_MAX])) + more + (" are" if len(names) > 1 else " is")
