"""Moving segments between main memory and disk: what is in use comes in, layer by layer, and what is offloaded leaves."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvdb.catalog.catalog import Context
from kvdb.catalog.segment import Views
from kvdb.errors import Unsupported
from kvdb.storage.loader import Loader
from kvdb.storage.store import BlockStore


def bring_in(views: Views, loader: Loader) -> None:
    """Keep these segments in main memory until `let_go`; those on disk are on their way when this returns, and
    `Segment.wait` says of a layer when it is there. Raises CapacityError or Unavailable, and then nothing is kept."""
    with ExitStack() as undo:
        for view in views:
            view.segment.pin(loader)
            undo.callback(view.segment.unpin)
        undo.pop_all()


def let_go(views: Views) -> None:
    """The opposite of `bring_in`; what is to leave main memory does so when the last lets go."""
    for view in views:
        view.segment.unpin()


@contextmanager
def kept_in(views: Views, loader: Loader) -> Iterator[None]:
    """`bring_in` and, at the end of the body, `let_go`."""
    bring_in(views, loader)
    try:
        yield
    finally:
        let_go(views)


def offload(context: Context, blocks: BlockStore) -> int:
    """Write a context's segments to disk, where they are not yet, and free their blocks: those that nobody uses now, and the
    others once nobody does. Bytes of main memory that were freed now. The caller holds the context.

    Raises Unsupported without a folder for them, CapacityError or Unavailable where they cannot be written; segments that were
    not are in memory as before.
    """
    if blocks.disk is None:
        raise Unsupported(
            f"context {context.name!r} cannot be offloaded, as the database has no place on disk; set storage.disk_path to a "
            "folder that it may use"
        )
    return sum(view.segment.offload(blocks.disk, context.spec.digest) for view in context.views)
