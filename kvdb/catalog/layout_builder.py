"""Turns the parts of a prompt into a layout, which says which stored tokens stand at which positions."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

import kvdb.validate as validate
from kvdb.blend.rope_shift import check_movable
from kvdb.catalog.catalog import Catalog
from kvdb.catalog.contexts.context import StoredContext
from kvdb.catalog.segments.layout import ContextLayout
from kvdb.catalog.segments.overlay import Overlay
from kvdb.catalog.segments.segment_view import SegmentView, Views, release_views, visible_tokens
from kvdb.errors import InvalidArgument, PositionError, SpecMismatch
from kvdb.types import ModelSpec, PromptPart, Tokens


class PromptLayout(NamedTuple):
    """The layout of a prompt, and its tokens.

    layout: the positions up to the end of the last stored part. tokens: the ids of all parts, also of those behind the layout.
    overlay: the recomputed tokens of a blended context at the beginning, None without one.
    """

    layout: ContextLayout
    tokens: Tokens
    overlay: Overlay | None


def build_layout(
    catalog: Catalog, spec: ModelSpec, parts: Sequence[PromptPart], salt: str = "", others: Collection[str] = ()
) -> PromptLayout:
    """Place the parts one behind the other; the source of each is the name of a context, or token ids. others: salts beside that
    of the session under which contexts may be stored.

    The caller owns a reference to each view's segment, and the overlay. Raises NotFound, SpecMismatch for KV of another model or
    salt, PositionError for a part that does not begin where the caller believes, and InvalidArgument for one that cannot stand
    there, and Unsupported for a model whose layers differ."""
    if not spec.uniform:
        check_movable(spec)
    builder = _LayoutBuilder(catalog, spec, salt, others)
    with ExitStack() as undo:
        undo.callback(builder.release)
        for number, part in enumerate(parts):
            builder.add(number, part)
        undo.pop_all()
    return builder.build()


class _LayoutBuilder:
    """A layout that grows by one part at a time. Owns what it acquired until `build`."""

    def __init__(self, catalog: Catalog, spec: ModelSpec, salt: str, others: Collection[str]) -> None:
        self._catalog = catalog
        self._spec = spec
        self._salt = salt
        self._salts = {salt, *others}
        self._views: Views = ()
        self._overlay: Overlay | None = None
        self._tokens: list[Tokens] = []
        self._end = self._stored_end = self._prefix_end = 0

    def add(self, number: int, part: PromptPart) -> None:
        """Place the part of that number behind the others. Raises what `build_layout` raises."""
        if part.at is not None and part.at != self._end:
            how = "overlaps what is before it" if part.at < self._end else "leaves positions empty"
            raise PositionError(f"part {number} begins at {self._end}, and at={part.at} {how}; expected at={self._end}, or none")
        if not isinstance(part.source, str):
            ids = validate.token_ids(part.source)
            self._add_tokens(ids[: _visible(number, part, len(ids))])
            return
        context = self._catalog.acquire(part.source)
        with ExitStack() as undo:
            undo.callback(context.release)
            self._check(number, part, context)
            undo.pop_all()
        self._add_context(context, _visible(number, part, context.layout.length))

    def _check(self, number: int, part: PromptPart, context: StoredContext) -> None:
        """Raises SpecMismatch or InvalidArgument for a context that cannot stand here."""
        if context.spec != self._spec:
            raise SpecMismatch(
                f"part {number}, context {context.name!r}, holds the KV of {context.spec}; the session is of {self._spec}"
            )
        if context.salt not in self._salts:
            raise SpecMismatch(f"part {number}, context {context.name!r}, is stored under another salt than the session's")
        visible = _visible(number, part, context.layout.length)
        if context.chunk:
            return
        if number:
            raise InvalidArgument(
                f"part {number}, context {context.name!r}, was computed behind other tokens, so it stands at the beginning only; "
                "import it with import_chunk to lay it out anywhere"
            )
        if visible != context.layout.length:
            raise InvalidArgument(
                f"part {number} shows {visible} of the {context.layout.length} tokens of {context.name!r}, which is made of "
                "several segments; expected all of it"
            )

    def _add_tokens(self, ids: Tokens) -> None:
        if not self._views and not self._end:  # at the beginning, their stored prefix is exact
            self._views = self._catalog.match(self._spec, ids, self._salt)
            self._stored_end = visible_tokens(self._views)
        self._tokens.append(ids)
        self._end += len(ids)

    def _add_context(self, context: StoredContext, visible: int) -> None:
        """Takes over the caller's references to the context."""
        if context.chunk:
            self._views = (*self._views, *_laid(context.chunk, visible, self._end))
        else:
            self._views, self._overlay, self._prefix_end = context.views, context.overlay, context.layout.length
        self._tokens.append(context.tokens[:visible])
        self._end += visible
        self._stored_end = self._end

    def build(self) -> PromptLayout:
        tokens = np.concatenate([np.zeros(0, np.int32), *self._tokens])
        return PromptLayout(ContextLayout(self._views, self._stored_end, self._prefix_end), tokens, self._overlay)

    def release(self) -> None:
        release_views(self._views)
        if self._overlay is not None:
            self._overlay.release()


def _laid(chunk: Views, visible: int, position: int) -> Views:
    """The first `visible` tokens of a chunk at that position. Takes over the caller's references, and gives back those to what is
    not seen."""
    laid: Views = ()
    for view in chunk:
        if seen := min(view.visible, visible - visible_tokens(laid)):
            laid = (*laid, SegmentView(view.segment, seen, position - chunk[0].segment.base))
        else:
            view.segment.release()
    return laid


def _visible(number: int, part: PromptPart, length: int) -> int:
    """The number of a part's `length` tokens that count. Raises InvalidArgument."""
    visible: Any = part.visible
    if visible is None:
        return length
    if isinstance(visible, bool) or not isinstance(visible, int | np.integer) or not 1 <= visible <= length:
        raise InvalidArgument(f"part {number} shows visible={visible!r} tokens; expected 1 to {length}, as many as it holds")
    return int(visible)
