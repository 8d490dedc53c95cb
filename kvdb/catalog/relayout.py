"""Segments in place of others that hold the same tokens, and how the views of contexts change with them."""

from typing import NamedTuple

from kvdb.catalog.prefix_tree import Place
from kvdb.catalog.segment import Segment, SegmentView, Views


class Piece(NamedTuple):
    """The first `length` tokens of a segment: all that any context sees of it."""

    segment: Segment
    length: int


class Relayout(NamedTuple):
    """Contexts that see `pieces`, one behind the other, the first at `place`, are to see `targets`, of the same tokens."""

    place: Place
    pieces: tuple[Piece, ...]
    targets: tuple[Piece, ...]

    def views(self, views: Views) -> Views:
        """The views of a context afterwards. One that does not see the first piece, or sees more of a segment than its piece, is
        left as it is."""
        segments = [view.segment for view in views]
        if self.pieces[0].segment not in segments:
            return views
        first = last = segments.index(self.pieces[0].segment)
        shown = 0
        for view, piece in zip(views[first:], self.pieces, strict=False):
            if view.segment is not piece.segment:
                break
            if view.visible > piece.length:
                return views
            shown += view.visible
            last += 1
            if view.visible < piece.length:
                break
        return (*views[:first], *self._show(shown), *views[last:])

    def _show(self, shown: int) -> Views:
        """Views of the first `shown` tokens of the targets."""
        views: Views = ()
        for target in self.targets:
            if shown > 0:
                views = (*views, SegmentView(target.segment, min(shown, target.length)))
                shown -= target.length
        return views
