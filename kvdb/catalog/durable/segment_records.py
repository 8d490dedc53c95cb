"""What a durable catalogue keeps of views, and of the segments that they show."""

from kvdb.catalog.durable.catalog_records import SegmentRecord, ViewRecord
from kvdb.catalog.segments.segment_view import Views


def records_of(spec: str, views: Views) -> tuple[list[SegmentRecord], tuple[ViewRecord, ...]]:
    """What is kept of views and their segments, which are on the disk. spec: the digest of their spec."""
    segments, listed = [], []
    for view in views:
        segment = view.segment
        assert segment.stored is not None
        key, block_size = segment.stored.key, segment.tables[0].layout.block_size
        place = key, spec, block_size, segment.base, segment.standalone
        segments.append(SegmentRecord(*place, segment.ids, segment.format, segment.rounding, segment.stored.digest))
        listed.append(ViewRecord(key, view.visible, view.shift))
    return segments, tuple(listed)
