"""The prefix tree over token ids: which stored segments a prompt begins with.

A node is a segment. Its children hang at the token where they diverge from it, in its middle or at its end, so no segment is ever
split: a prompt that shares the first m tokens of a segment holds the view `visible=m`.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from kvdb.catalog.segment import Segment, SegmentView, Views
from kvdb.types import Tokens

Branch = tuple[int, int, int]  # parent segment's number (0: none), how many of its tokens come before, first token of the child


class PrefixTree:
    """The segments of one spec that stored contexts name. Not thread-safe: the catalogue locks."""

    def __init__(self) -> None:
        self._children: dict[Branch, dict[Segment, Counter[int]]] = {}  # how many contexts see how many tokens of each child

    def add(self, views: Views) -> None:
        """Count one more context that names this path."""
        for branch, view in _branches(views):
            contexts_by_visible = self._children.setdefault(branch, {}).setdefault(view.segment, Counter())
            contexts_by_visible[view.visible] += 1

    def remove(self, views: Views) -> None:
        """Count one context less that names this path; tokens that no context sees any more are not found again."""
        for branch, view in _branches(views):
            children = self._children[branch]
            children[view.segment] -= Counter({view.visible: 1})
            if not children[view.segment]:
                del children[view.segment]
            if not children:
                del self._children[branch]

    def match(self, tokens: Tokens) -> Views:
        """The path that holds the longest stored prefix of `tokens`, int32 `[n]`; empty when none does.

        Several segments may begin with the same tokens (one was stored while the other was not in the tree), so every candidate
        is tried.
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
            for segment, contexts_by_visible in self._children.get((*parent, int(tokens[matched])), {}).items():
                common = common_prefix(segment.tokens[: max(contexts_by_visible)], tokens[matched:])
                paths.append((matched + common, (*views, SegmentView(segment, common))))
        return best[1]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """The number of leading tokens that a and b share."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def _branches(views: Views) -> Iterator[tuple[Branch, SegmentView]]:
    parent = (0, 0)
    for view in views:
        yield (*parent, int(view.segment.tokens[0])), view
        parent = (view.segment.number, view.visible)


def concatenate(views: Views) -> Tokens:
    """The token ids that the views show, int32."""
    parts = [view.segment.tokens[: view.visible] for view in views]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
