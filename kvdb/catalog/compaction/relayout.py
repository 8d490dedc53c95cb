"""Segments in place of others that hold the same tokens, and how the views of contexts change with them."""

from typing import NamedTuple

from kvdb.catalog.contexts.prefix_tree import Place
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import SegmentView, Views


class Piece(NamedTuple):
    """The first `length` tokens of a segment: all that any context sees of it."""

    segment: Segment
    length: int


class Target(NamedTuple):
    """The first `length` tokens of a segment, of which contexts see `used`, or may do so from now on."""

    segment: Segment
    length: int
    used: int

    @classmethod
    def whole(cls, segment: Segment) -> "Target":
        return cls(segment, len(segment), len(segment))


class Relayout(NamedTuple):
    """Contexts that see `pieces`, one behind the other, the first at `place`, are to see `targets`, of the same tokens."""

    place: Place
    pieces: tuple[Piece, ...]
    targets: tuple[Target, ...]

    def views(self, views: Views) -> Views:
        """The views of a context afterwards. One that does not see the first piece, or sees more of a segment than its piece, is
        left as it is, and so is one that came meanwhile and goes on like the targets: it would not be found behind them."""
        before, shown, behind = self._around(views)
        if not shown:
            return views
        targets = self._show(shown)
        if behind and self._goes_on(targets[-1], behind[0].segment.ids.first):
            return views
        return (*before, *targets, *behind)

    def views_of_holder(self, views: Views) -> Views:
        """The views of a session afterwards, which nobody needs to find."""
        before, shown, behind = self._around(views)
        return (*before, *self._show(shown), *behind) if shown else views

    def _around(self, views: Views) -> tuple[Views, int, Views]:
        """The views before the pieces, how many tokens of the pieces are seen, 0 where they are not to be replaced, and the views
        behind them."""
        segments = [view.segment for view in views]
        if self.pieces[0].segment not in segments:
            return views, 0, ()
        first = last = segments.index(self.pieces[0].segment)
        shown = 0
        for view, piece in zip(views[first:], self.pieces, strict=False):
            if view.segment is not piece.segment:
                break
            if view.visible > piece.length:
                return views, 0, ()
            shown += view.visible
            last += 1
            if view.visible < piece.length:
                break
        return views[:first], shown, views[last:]

    def _show(self, shown: int) -> Views:
        """Views of the first `shown` tokens of the targets."""
        views: Views = ()
        for target in self.targets:
            if shown > 0:
                views = (*views, SegmentView(target.segment, min(shown, target.length)))
                shown -= target.length
        return views

    def _goes_on(self, view: SegmentView, token: int) -> bool:
        """Whether contexts see, or may see, that token in a target behind what a view shows of it."""
        used = next(target.used for target in self.targets if target.segment is view.segment)
        return view.visible < used and int(view.segment.ids.unpack(view.visible, view.visible + 1)[0]) == token
