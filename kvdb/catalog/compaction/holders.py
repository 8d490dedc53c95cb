"""Open sessions that hold stored segments beside the contexts, so that space is laid out for both."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from kvdb.catalog.compaction.relayout import Relayout
from kvdb.catalog.contexts.prefix_tree import Contexts, Place, PrefixTree
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import Views
from kvdb.types import ModelSpec


class Holder(Protocol):
    """An open session over a stored prefix.

    due: set from any thread, so that its next call begins with `SpaceKeeper.catch_up`.
    """

    spec: ModelSpec
    salt: str
    due: bool

    @property
    def views(self) -> Views:
        """The segments that it stands on."""
        ...

    def try_catch_up(self) -> None:
        """Do what is due, unless a call on it is under way, behind which the next one will."""
        ...

    def go_over(self, relayout: Relayout) -> None:
        """Stand on the targets from now on, if it sees the pieces. The caller has its turn."""
        ...


class HeldViews(NamedTuple):
    """What a holder stands on, and its name in the tree of holders."""

    name: str
    holder: Holder
    views: Views


class JointTree(PrefixTree):
    """What contexts see and what holders stand on, as one tree to look at."""

    def __init__(self, contexts: PrefixTree, holders: PrefixTree) -> None:
        super().__init__()
        self._both = contexts, holders

    def alike(self, place: Place, token: int) -> dict[Segment, Contexts]:
        contexts, holders = self._both
        return _joined(contexts.alike(place, token), holders.alike(place, token))

    def overlaps(self, segment: Segment) -> dict[int, int]:
        contexts, holders = self._both
        return {**contexts.overlaps(segment), **holders.overlaps(segment)}

    def children(self, place: Place) -> Iterator[tuple[Segment, Contexts]]:
        contexts, holders = self._both
        return iter(_joined(dict(contexts.children(place)), dict(holders.children(place))).items())


def _joined(contexts: dict[Segment, Contexts], holders: dict[Segment, Contexts]) -> dict[Segment, Contexts]:
    """Each segment with whoever sees the most of it."""
    joined = dict(contexts)
    for segment, held in holders.items():
        if segment not in joined or joined[segment].visible < held.visible:
            joined[segment] = held
    return joined
