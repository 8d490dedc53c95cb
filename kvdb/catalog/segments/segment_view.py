"""Views of segments: what a context sees of each."""

from dataclasses import dataclass

from kvdb.catalog.segments.segment import Segment


@dataclass(frozen=True)
class SegmentView:
    """A segment as a context sees it: only its first `visible` tokens, moved by `shift` from where it was computed."""

    segment: Segment
    visible: int
    shift: int = 0

    def __post_init__(self) -> None:
        assert 1 <= self.visible <= len(self.segment)

    @property
    def begin(self) -> int:
        """The position of its first token in the context."""
        return self.segment.base + self.shift

    @property
    def end(self) -> int:
        """The position behind its last visible token."""
        return self.begin + self.visible


Views = tuple[SegmentView, ...]


def release_views(views: Views) -> None:
    """Release one reference to each view's segment."""
    for view in views:
        view.segment.release()


def visible_tokens(views: Views) -> int:
    """The number of tokens that the views show."""
    return sum(view.visible for view in views)
