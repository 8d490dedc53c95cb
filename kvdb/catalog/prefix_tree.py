"""The prefix tree over token ids: which stored segments a prompt begins with.

A node is a segment. Its children hang at the token where they leave it, in its middle or at its end, so nothing is ever
split: a prompt that shares the first m tokens of a segment holds the view `visible=m`.
"""

import numpy as np

from kvdb.catalog.segment import Segment, SegmentView, Views
from kvdb.types import Tokens

Edge = tuple[int, int, int]  # parent segment's number (0: none), how many of its tokens come before, first token of the child


class PrefixTree:
    """Segments of one spec that stored contexts name. Not thread-safe: the catalogue locks."""

    def __init__(self) -> None:
        self._children: dict[Edge, list[Segment]] = {}
        self._uses: dict[tuple[Edge, int], int] = {}  # contexts that pass from this edge to the segment of this number

    def add(self, views: Views) -> None:
        """One more context names this path."""
        for edge, segment in _edges(views):
            use = (edge, segment.number)
            self._uses[use] = self._uses.get(use, 0) + 1
            if self._uses[use] == 1:
                self._children.setdefault(edge, []).append(segment)

    def remove(self, views: Views) -> None:
        """One context less names this path."""
        for edge, segment in _edges(views):
            use = (edge, segment.number)
            self._uses[use] -= 1
            if not self._uses[use]:
                del self._uses[use]
                self._children[edge].remove(segment)
                if not self._children[edge]:
                    del self._children[edge]

    def match(self, tokens: Tokens) -> Views:
        """The path that holds the longest stored prefix of `tokens`, int32 `[n]`; empty when none does.

        Several segments may begin alike (one was stored while the other was not in the tree), so every candidate is tried.
        """
        best: tuple[int, Views] = (0, ())
        paths: list[tuple[int, Views]] = [best]
        while paths:
            matched, views = paths.pop()
            if matched > best[0]:
                best = (matched, views)
            if matched == len(tokens):
                continue
            parent = (views[-1].segment.number, views[-1].visible) if views else (0, 0)
            for segment in self._children.get((*parent, int(tokens[matched])), ()):
                common = common_prefix(segment.tokens, tokens[matched:])
                paths.append((matched + common, (*views, SegmentView(segment, common))))
        return best[1]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens a and b share."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def _edges(views: Views) -> list[tuple[Edge, Segment]]:
    parents = [(0, 0), *((view.segment.number, view.visible) for view in views)]
    return [((*parent, int(view.segment.tokens[0])), view.segment) for parent, view in zip(parents, views, strict=False)]


def concatenate(views: Views) -> Tokens:
    """The token ids that the views show, int32."""
    parts = [view.segment.tokens[: view.visible] for view in views]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
