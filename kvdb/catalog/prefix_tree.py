"""The prefix tree over token ids: which stored segments a prompt begins with.

A node is a segment. Its children hang at the token where they diverge from it, in its middle or at its end, so no segment is ever
split: a prompt that shares the first m tokens of a segment holds the view `visible=m`.
"""

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from kvdb.catalog.packed_ids import Prompt
from kvdb.catalog.segment import Segment, SegmentView, Views
from kvdb.types import Tokens

Path: TypeAlias = "tuple[Segment, int, Path] | None"
"""The last segment of a path, how many of its tokens belong to it, and the path before it."""


class PrefixTree:
    """The segments of one spec that stored contexts name. Not thread-safe: the catalogue locks."""

    def __init__(self) -> None:
        self._children: dict[int, tuple[_Child, ...]] = {}  # by branch

    def add(self, views: Views) -> None:
        """Count one more context that names this path."""
        for branch, view in _branches(views):
            children = self._children.get(branch, ())
            for child in children:
                if child.segment is view.segment:
                    child.add(view.visible)
                    break
            else:
                self._children[branch] = (*children, _Child(view.segment, view.visible))

    def remove(self, views: Views) -> None:
        """Count one context less that names this path; tokens that no context sees any more are not found again."""
        for branch, view in _branches(views):
            left = []
            for child in self._children[branch]:
                if child.segment is not view.segment or child.remove(view.visible):
                    left.append(child)
            if left:
                self._children[branch] = tuple(left)
            else:
                del self._children[branch]

    def match(self, tokens: Tokens) -> Views:
        """The path that holds the longest stored prefix of `tokens`, int32 `[n]`; empty when none does.

        Several segments may begin with the same tokens (one was stored while the other was not in the tree), so every candidate
        is tried.
        """
        prompt = Prompt(tokens)
        best: tuple[int, Path] = 0, None
        paths: list[tuple[int, Path]] = [best]
        while paths:
            matched, path = paths.pop()
            if matched > best[0]:
                best = matched, path
            if matched == len(tokens):
                continue
            parent = (0, 0) if path is None else (path[0].number, path[1])
            for child in self._children.get(_branch(*parent, int(tokens[matched])), ()):
                common = child.segment.ids.common(prompt, matched, child.visible)
                paths.append((matched + common, (child.segment, common, path)))
        return _views(best[1])


class _Child:
    """A segment behind a branch. visible: how many of its tokens any context sees.

    Most segments are seen by contexts that see the same number of their tokens, so that two numbers say it: `visible` and how
    many contexts. Others have a count for each number.
    """

    __slots__ = ("_contexts", "_counts", "segment", "visible")

    def __init__(self, segment: Segment, visible: int) -> None:
        self.segment = segment
        self.visible = visible
        self._contexts = 1
        self._counts: Counter[int] | None = None

    def add(self, visible: int) -> None:
        """Count one more context that sees so many tokens."""
        if self._counts is None and visible == self.visible:
            self._contexts += 1
            return
        if self._counts is None:
            self._counts = Counter({self.visible: self._contexts})
        self._counts[visible] += 1
        self.visible = max(self.visible, visible)

    def remove(self, visible: int) -> bool:
        """Count one context less that sees so many. Returns whether any is left."""
        if self._counts is None:
            assert visible == self.visible
            self._contexts -= 1
            return self._contexts > 0
        self._counts -= Counter({visible: 1})
        if visible == self.visible and visible not in self._counts and self._counts:
            self.visible = max(self._counts)
        return bool(self._counts)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """The number of leading tokens that a and b share."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def concatenate(views: Views) -> Tokens:
    """The token ids that the views show, int32."""
    parts = [view.segment.ids.unpack(0, view.visible) for view in views]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _branch(parent: int, visible: int, token: int) -> int:
    """The key of a branch, one number because there are many. parent: the number of the parent segment, 0 for none. visible: how
    many of its tokens come before. token: the first token of the child."""
    return (parent << 32 | visible) << 32 | token


def _branches(views: Views) -> Iterator[tuple[int, SegmentView]]:
    parent = (0, 0)
    for view in views:
        yield _branch(*parent, int(view.segment.ids.unpack(0, 1)[0])), view
        parent = (view.segment.number, view.visible)


def _views(path: Path) -> Views:
    views = []
    while path is not None:
        segment, visible, path = path
        views.append(SegmentView(segment, visible))
    return tuple(reversed(views))
