"""Which stored tokens stand at which positions of a context, and which positions are gaps."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from indexes.base import Int64
from kvdb.catalog.segments.segment_view import Views, visible_tokens
from kvdb.types import Placed


@dataclass(frozen=True)
class ContextLayout:
    """Views in the order of their positions, within [0, length). Positions without a view are gaps: only an overlay holds them.

    prefix_end: the positions [0, prefix_end) were blended earlier and are reused as a prefix.
    """

    views: Views
    length: int
    prefix_end: int = 0

    @classmethod
    def contiguous(cls, views: Views) -> "ContextLayout":
        """Views without gaps, such as those of a prefix."""
        return cls(views, visible_tokens(views))

    def cut(self, tokens: int) -> "ContextLayout":
        """The layout of its first `tokens` positions; a view that reaches further shows less of its segment."""
        views = tuple(replace(view, visible=min(view.visible, tokens - view.begin)) for view in self.views if view.begin < tokens)
        return ContextLayout(views, tokens, min(self.prefix_end, tokens))

    def __post_init__(self) -> None:
        end = 0
        for view in self.views:
            assert view.begin >= end, "views overlap"
            end = view.end
        assert end <= self.length

    @property
    def moved(self) -> bool:
        """Whether any view stands at another position than the one it was computed at."""
        return any(view.shift for view in self.views)

    @cached_property
    def plain(self) -> bool:
        """Whether the layout is a prefix: every view is exact where it stands, and there are no gaps."""
        behind = all(not view.segment.standalone or view.begin == 0 for view in self.views)
        return behind and not self.moved and visible_tokens(self.views) == self.length

    @cached_property
    def gaps(self) -> Int64:
        """The positions that no view holds, ascending."""
        held = np.zeros(self.length, np.bool_)
        for view in self.views:
            held[view.begin : view.end] = True
        return np.flatnonzero(~held).astype(np.int64)

    @cached_property
    def placed(self) -> tuple[Placed, ...]:
        """What stands at which positions, over all of [0, length)."""
        placed = [Placed(0, self.prefix_end, "prefix")] if self.prefix_end else []
        at = self.prefix_end
        for view in self.views:
            if view.end <= self.prefix_end:
                continue
            if view.begin > at:
                placed.append(Placed(at, view.begin, "tokens"))
            chunk = view.shift != 0 or (view.segment.standalone and view.begin > 0)
            goes_on = chunk and not view.segment.standalone  # with the chunk of the view before it
            begin = placed.pop().begin if goes_on else view.begin
            placed.append(Placed(begin, view.end, "chunk" if chunk else "prefix"))
            at = view.end
        if at < self.length:
            placed.append(Placed(at, self.length, "tokens"))
        return tuple(placed)
