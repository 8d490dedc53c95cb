"""Writes the files of a context, before the catalogue's file names them."""

from contextlib import ExitStack
from dataclasses import dataclass, replace

import kvdb.catalog.durable.stored_overlay as stored_overlay
from kvdb.catalog.contexts.context import StoredContext
from kvdb.catalog.durable.catalog_records import ContextRecord, SegmentRecord
from kvdb.catalog.durable.segment_records import records_of
from kvdb.storage.disk import DiskTier


@dataclass(frozen=True)
class WrittenContext:
    """A context as it stands on its files, and what the catalogue's file is to say of it and of its segments."""

    context: StoredContext
    segments: list[SegmentRecord]
    record: ContextRecord


def write_context(context: StoredContext, disk: DiskTier, undo: ExitStack) -> WrittenContext:
    """Write the files of a context that are not there, as its durability asks. undo: removes what nothing will name. Raises
    CapacityError or Unavailable."""
    synced = context.durability != "os"
    for view in context.views:
        view.segment.write(disk, context.spec.digest, synced=synced)
    segments, views = records_of(context.spec.digest, context.views)
    layout, tokens = context.layout, None if context.plain else context.tokens
    place = layout.length, layout.prefix_end, views
    record = ContextRecord(context.name, context.spec.digest, *place, tokens, context.salt)
    if context.overlay is None:
        return WrittenContext(context, segments, record)
    overlay, kept = stored_overlay.store(context.overlay, disk, context.spec.digest, synced=synced)
    undo.callback(overlay.release)
    return WrittenContext(replace(context, overlay=overlay), segments, record._replace(overlay=kept))
