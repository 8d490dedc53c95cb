"""Where the stored tokens of a context stand, and which of its positions nothing stored holds."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from indexes.base import Int64
from kvdb.catalog.segment import Views, visible_tokens
from kvdb.types import Placed


@dataclass(frozen=True)
class Layout:
    """Views in the order of their positions, within [0, length). Positions of no view are gaps: only an overlay holds them.

    settled: what stands before it was blended earlier and is reused as a prefix.
    """

    views: Views
    length: int
    settled: int = 0

    @classmethod
    def behind_each_other(cls, views: Views) -> "Layout":
        """Views without gaps, such as those of a prefix."""
        return cls(views, visible_tokens(views))

    def __post_init__(self) -> None:
        end = 0
        for view in self.views:
            assert view.begin >= end, "views overlap"
            end = view.end
        assert end <= self.length

    @property
    def moved(self) -> bool:
        """Whether any view stands elsewhere than where it was computed."""
        return any(view.shift for view in self.views)

    @cached_property
    def plain(self) -> bool:
        """Whether it is a prefix: every view exact where it stands, and no gaps."""
        behind = all(not view.segment.alone or view.begin == 0 for view in self.views)
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
        """What stands where, over all of [0, length)."""
        found = [Placed(0, self.settled, "prefix")] if self.settled else []
        at = self.settled
        for view in self.views:
            if view.end <= self.settled:
                continue
            if view.begin > at:
                found.append(Placed(at, view.begin, "tokens"))
            chunk = view.segment.alone and view.begin > 0
            found.append(Placed(view.begin, view.end, "chunk" if chunk else "prefix"))
            at = view.end
        if at < self.length:
            found.append(Placed(at, self.length, "tokens"))
        return tuple(found)
