"""From the parts a caller names to what stands where."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

import kvdb.check as check
from kvdb.catalog.catalog import Catalog, Context, let_go
from kvdb.catalog.layout import Layout
from kvdb.catalog.overlay import Overlay
from kvdb.catalog.segment import SegmentView, Views
from kvdb.errors import InvalidArgument, PositionError, SpecMismatch
from kvdb.types import ModelSpec, Part, Tokens


class LaidOut(NamedTuple):
    """tokens: of all parts, those behind the layout too. overlay: of a blended context at the beginning."""

    layout: Layout
    tokens: Tokens
    overlay: Overlay | None


def lay_out(catalog: Catalog, spec: ModelSpec, parts: Sequence[Part]) -> LaidOut:
    """Parts in their order, each where the one before it ends. source of each: a context's name, or token ids.

    The caller owns a reference to each view's segment, and the overlay. Raises NotFound, SpecMismatch for KV of another model,
    PositionError for a part that does not begin where the caller believes, InvalidArgument for one that cannot stand there.
    """
    laying = _Laying(catalog, spec)
    with ExitStack() as undo:
        undo.callback(laying.let_go)
        for number, part in enumerate(parts):
            laying.add(number, part)
        undo.pop_all()
    return laying.laid_out()


class _Laying:
    def __init__(self, catalog: Catalog, spec: ModelSpec) -> None:
        self._catalog = catalog
        self._spec = spec
        self._views: Views = ()
        self._overlay: Overlay | None = None
        self._tokens: list[Tokens] = []
        self._end = self._laid_end = self._settled = 0

    def add(self, number: int, part: Part) -> None:
        if part.at is not None and part.at != self._end:
            how = "overlaps what is before it" if part.at < self._end else "leaves positions empty"
            raise PositionError(f"part {number} begins at {self._end}, and at={part.at} {how}; expected at={self._end}, or none")
        if not isinstance(part.source, str):
            ids = check.token_ids(part.source)
            self._add_tokens(ids[: _visible(number, part, len(ids))])
            return
        context = self._catalog.hold(part.source)
        with ExitStack() as undo:
            undo.callback(let_go, context)
            self._check(number, part, context)
            undo.pop_all()
        self._add_context(context, _visible(number, part, context.layout.length))

    def _check(self, number: int, part: Part, context: Context) -> None:
        """Raises SpecMismatch or InvalidArgument for a context that cannot stand here."""
        if context.spec != self._spec:
            raise SpecMismatch(
                f"part {number}, context {context.name!r}, holds the KV of {context.spec}; the session is of {self._spec}"
            )
        visible = _visible(number, part, context.layout.length)
        if context.alone is not None:
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
        if not self._views and not self._end:  # at the beginning, what is stored of them is exact
            self._views = self._catalog.match(self._spec, ids)
            self._laid_end = sum(view.visible for view in self._views)
        self._tokens.append(ids)
        self._end += len(ids)

    def _add_context(self, context: Context, visible: int) -> None:
        """Takes over the caller's references."""
        segment = context.alone
        if segment is not None:
            self._views = (*self._views, SegmentView(segment, visible, self._end - segment.base))
        else:
            self._views, self._overlay, self._settled = context.views, context.overlay, context.layout.length
        self._tokens.append(context.tokens[:visible])
        self._end += visible
        self._laid_end = self._end

    def laid_out(self) -> LaidOut:
        tokens = np.concatenate([np.zeros(0, np.int32), *self._tokens])
        return LaidOut(Layout(self._views, self._laid_end, self._settled), tokens, self._overlay)

    def let_go(self) -> None:
        for view in self._views:
            view.segment.release()
        if self._overlay is not None:
            self._overlay.release()


def _visible(number: int, part: Part, length: int) -> int:
    """How many of a part's tokens count. Raises InvalidArgument."""
    visible: Any = part.visible
    if visible is None:
        return length
    if isinstance(visible, bool) or not isinstance(visible, int | np.integer) or not 1 <= visible <= length:
        raise InvalidArgument(f"part {number} shows visible={visible!r} tokens; expected 1 to {length}, as many as it holds")
    return int(visible)
