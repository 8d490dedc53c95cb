"""Segments of which blended contexts see less than there is, after everything else that held them was dropped."""

from collections.abc import Iterable
from typing import NamedTuple

from kvdb.catalog.compaction.chains import WASTE_MAX
from kvdb.catalog.contexts.context import StoredContext
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import SegmentView, Views


class PartlySeen(NamedTuple):
    """A segment that blended contexts of these names hold, and nobody else; they see at most its first `seen` tokens. spec: the
    digest of their model's spec."""

    spec: str
    segment: Segment
    seen: int
    names: list[str]


class Trimmed(NamedTuple):
    """A segment that takes the place of another, whose first tokens it holds, wherever these stand."""

    old: Segment
    new: Segment

    def views(self, views: Views) -> Views:
        """The views of a context afterwards; they are as they were if it sees more."""
        if any(view.segment is self.old and view.visible > len(self.new) for view in views):
            return views
        return tuple(SegmentView(self.new, view.visible, view.shift) if view.segment is self.old else view for view in views)


def is_partial(context: StoredContext) -> bool:
    """Whether a context is blended and sees less of a segment than there is."""
    return not context.plain and any(view.visible < len(view.segment) for view in context.views)


def partly_seen(contexts: Iterable[StoredContext]) -> list[PartlySeen]:
    """What these contexts alone hold, and do not need all blocks of. contexts: the partial ones."""
    found: dict[Segment, PartlySeen] = {}
    views: dict[Segment, int] = {}
    for context in contexts:
        for view in context.views:
            before = found.get(view.segment, PartlySeen(context.spec.digest, view.segment, 0, []))
            found[view.segment] = before._replace(seen=max(before.seen, view.visible), names=[*before.names, context.name])
            views[view.segment] = views.get(view.segment, 0) + 1
    return [one for segment, one in found.items() if segment.references == views[segment] and _wastes(one)]


def _wastes(one: PartlySeen) -> bool:
    layout = one.segment.tables[0].layout
    return layout.blocks_for(len(one.segment)) > WASTE_MAX * layout.blocks_for(one.seen)
