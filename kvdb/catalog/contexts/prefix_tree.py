"""The prefix tree over token ids: which stored segments a prompt begins with.

A node is a segment. Its children hang at the token where they diverge from it, in its middle or at its end, so no segment is ever
split: a prompt that shares the first m tokens of a segment holds the view `visible=m`.
"""

from collections.abc import Collection, Iterator
from typing import TypeAlias

import numpy as np

from kvdb.catalog.segments.packed_ids import Prompt
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import SegmentView, Views
from kvdb.types import Tokens

Place = tuple[int, int]
"""Where a child hangs: its parent's number (0: none), and how many of the parent's tokens come before it."""

Path: TypeAlias = "tuple[Segment, int, Path] | None"
"""The last segment of a path, how many of its tokens belong to it, and the path before it."""


class Contexts:
    """The contexts that see one segment at one place, by name, and how many of its tokens each sees. visible: the most that any
    of them sees. Most segments are seen by one context, whose name then takes no dictionary."""

    __slots__ = ("_at_most", "_only", "_visible_by_name", "segment", "visible")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._only: str | None = None
        self._visible_by_name: dict[str, int] | None = None
        self.visible = self._at_most = 0  # how many contexts see that many

    def __len__(self) -> int:
        return len(self.names)

    @property
    def names(self) -> Collection[str]:
        if self._visible_by_name is None:
            return () if self._only is None else (self._only,)
        return self._visible_by_name.keys()

    def add(self, name: str, visible: int) -> None:
        if self._visible_by_name is None and self._only is None:
            self._only, self.visible, self._at_most = name, visible, 1
            return
        if self._visible_by_name is None:
            self._visible_by_name, self._only = {str(self._only): self.visible}, None
        self._visible_by_name[name] = visible
        if visible > self.visible:
            self.visible, self._at_most = visible, 0
        self._at_most += visible == self.visible

    def remove(self, name: str) -> None:
        if self._visible_by_name is None:
            assert self._only == name
            self._only = None
            return
        self._at_most -= self._visible_by_name.pop(name) == self.visible
        if not self._at_most and self._visible_by_name:
            self.visible = max(self._visible_by_name.values())
            self._at_most = sum(visible == self.visible for visible in self._visible_by_name.values())


class PrefixTree:
    """The segments of one spec that stored contexts name. Not thread-safe: the catalogue locks."""

    def __init__(self) -> None:
        self._children: dict[Place, dict[int, tuple[Contexts, ...]]] = {}  # by the first token of the child
        self._overlaps: dict[int, dict[int, int]] = {}  # by the number of the parent: a child's place, and its first token

    def add(self, name: str, views: Views) -> None:
        """Add a context that names this path."""
        parent: SegmentView | None = None
        for place, view in places(views):
            by_token = self._children.setdefault(place, {})
            alike = by_token.get(view.segment.ids.first, ())
            contexts = next((contexts for contexts in alike if contexts.segment is view.segment), None)
            if contexts is None:
                contexts = Contexts(view.segment)
                by_token[view.segment.ids.first] = (*alike, contexts)
                if parent is not None and _goes_on(parent, view.segment.ids.first):
                    self._overlaps.setdefault(parent.segment.number, {})[parent.visible] = view.segment.ids.first
            contexts.add(name, view.visible)
            parent = view

    def remove(self, name: str, views: Views) -> None:
        """Forget a context that names this path; tokens that no context sees any more are not found again."""
        for place, view in places(views):
            by_token, token = self._children[place], view.segment.ids.first
            self.alike(place, token)[view.segment].remove(name)
            left = tuple(contexts for contexts in by_token[token] if contexts)
            if left:
                by_token[token] = left
            else:
                del by_token[token]
                self._forget_overlap(place, token)
            if not by_token:
                del self._children[place]

    def match(self, tokens: Tokens) -> Views:
        """The path that holds the longest stored prefix of `tokens`, int32 `[n]`; empty when none does.

        Several segments may begin with the same tokens (one was stored while the other was not in the tree), and one may hang
        in the middle of another that goes on like it (one was stored while no context saw so much of the other), so every
        candidate is tried.
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
            place = (0, 0) if path is None else (path[0].number, path[1])
            for segment, contexts in self.alike(place, int(tokens[matched])).items():
                common = segment.ids.common(prompt, matched, contexts.visible)
                paths.append((matched + common, (segment, common, path)))
                paths += [(matched + at, (segment, at, path)) for at in self.overlaps(segment) if at < common]
        return _views(best[1])

    def shows(self, views: Views) -> bool:
        """Whether contexts see everything that the views of a path show, where it shows it."""
        for place, view in places(views):
            contexts = self.alike(place, view.segment.ids.first).get(view.segment)
            if contexts is None or contexts.visible < view.visible:
                return False
        return True

    def alike(self, place: Place, token: int) -> dict[Segment, Contexts]:
        """The children at a place that begin with that token, and the contexts that see each."""
        return {contexts.segment: contexts for contexts in self._children.get(place, {}).get(token, ())}

    def overlaps(self, segment: Segment) -> dict[int, int]:
        """How many of its tokens come before children that begin like what follows in it, and the first token of these."""
        return self._overlaps.get(segment.number, {})

    def children(self, place: Place) -> Iterator[tuple[Segment, Contexts]]:
        """All children at a place, and the contexts that see each."""
        for alike in self._children.get(place, {}).values():
            yield from ((contexts.segment, contexts) for contexts in alike)

    def _forget_overlap(self, place: Place, token: int) -> None:
        """No child at a place begins with that token any more."""
        number, at = place
        overlaps = self._overlaps.get(number, {})
        if overlaps.get(at) == token:
            del overlaps[at]
            if not overlaps:
                del self._overlaps[number]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """The number of leading tokens that a and b share."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def places(views: Views) -> Iterator[tuple[Place, SegmentView]]:
    """The views of a path, each with the place where it hangs."""
    place = (0, 0)
    for view in views:
        yield place, view
        place = (view.segment.number, view.visible)


def place_behind(views: Views) -> Place:
    """The place where what comes behind these views hangs."""
    return (views[-1].segment.number, views[-1].visible) if views else (0, 0)


def concatenate(views: Views) -> Tokens:
    """The token ids that the views show, int32."""
    parts = [view.segment.ids.unpack(0, view.visible) for view in views]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _goes_on(view: SegmentView, token: int) -> bool:
    """Whether a segment goes on with that token behind what a view shows of it."""
    at = view.visible
    return at < len(view.segment) and int(view.segment.ids.unpack(at, at + 1)[0]) == token


def _views(path: Path) -> Views:
    views = []
    while path is not None:
        segment, visible, path = path
        views.append(SegmentView(segment, visible))
    return tuple(reversed(views))
