"""Moves segments between main memory and disk: sessions pin the segments they read, and offloading evicts those that nobody
pins."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from kvdb.catalog.contexts.context import StoredContext
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import Views
from kvdb.catalog.segments.snapshot import Snapshot
from kvdb.errors import CapacityError, Unsupported
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import CpuBudget, Reservation
from kvdb.storage.loader import Loader
from kvdb.storage.room import with_room
from kvdb.storage.store import BlockStore


def pin(views: Views, loader: Loader) -> None:
    """Keep these segments in main memory until `unpin`. Segments on disk are still being loaded when this returns; `Segment.wait`
    waits for one layer of one. Raises CapacityError or Unavailable, and then nothing is pinned."""
    with ExitStack() as undo:
        for view in views:
            view.segment.pin(loader)
            undo.callback(view.segment.unpin)
        undo.pop_all()


def make_room(views: Views, budget: CpuBudget) -> None:
    """Have contexts go until the segments that are on disk fit into main memory, or two layers of one that is larger, as far as
    they can go. The caller has locked no segment and no catalogue."""
    for segment in [view.segment for view in views if not view.segment.resident]:
        if budget.evict is not None and budget.limit is not None:
            table = segment.tables[0]
            with suppress(CapacityError):  # its layers come in when they are read
                table.tier.make_room(_wanted_nbytes(segment, budget.limit) // table.layout.nbytes)


def _wanted_nbytes(segment: Segment, limit: int) -> int:
    """The room that a segment on disk is to find in main memory."""
    layers = len(segment.tables)
    return segment.nbytes if segment.nbytes <= limit else min(2, layers) * segment.nbytes // layers


def unpin(views: Views) -> None:
    """Undo `pin`. A segment that was offloaded meanwhile leaves main memory with its last pin."""
    for view in views:
        view.segment.unpin()


@contextmanager
def pinned(views: Views, loader: Loader) -> Iterator[None]:
    """Keep these segments pinned while the body runs."""
    pin(views, loader)
    try:
        yield
    finally:
        unpin(views)


def offload(context: StoredContext, blocks: BlockStore) -> int:
    """Write a context's segments to disk, if they are not there yet, and free their blocks: at once if nobody pins them,
    otherwise with the last pin. Returns the bytes of main memory that were freed at once. The caller holds the context.

    Raises Unsupported without a folder for them, and CapacityError or Unavailable where they cannot be written; segments that
    were not written are in memory as before.
    """
    if blocks.disk is None:
        raise Unsupported(
            f"context {context.name!r} cannot be offloaded, as the database has no place on disk; set storage.disk_path to a "
            "folder that it may use"
        )
    return sum(view.segment.offload(blocks.disk, context.spec.digest) for view in context.views)


def pin_snapshot(snapshot: Snapshot, tails: Sequence[BlockTable], loader: Loader, budget: CpuBudget, beside: int) -> Reservation:
    """Keep the segments of a session in main memory, and take `beside` bytes of the budget for it. Raises CapacityError or
    Unavailable, and then releases the snapshot and the tails."""
    with ExitStack() as undo:
        undo.callback(snapshot.release)
        for tail in tails:
            undo.callback(tail.release)
        reservation = Reservation(budget, beside)
        undo.callback(reservation.release)
        make_room(snapshot.views, budget)
        absent = [view.segment for view in snapshot.views if not view.segment.whole]
        nbytes = max((_wanted_nbytes(segment, budget.limit or 0) for segment in absent), default=0)
        with_room(lambda: pin(snapshot.views, loader), budget.evict, nbytes)  # others may have taken what was made
        undo.pop_all()
    return reservation
