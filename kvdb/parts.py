"""What holds the visible tokens of one layer of a session, and how a plan divides it."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from indexes.base import Index
from indexes.retrieval import Dipr
from kvdb.attention.run import Run
from kvdb.attention.sections import HeadMask, ReadWhole, Searched, Sections
from kvdb.attention.span import Span
from kvdb.basis import Basis
from kvdb.catalog.segment import Segment, SegmentView
from kvdb.config import Config
from kvdb.tail import KIND, NAME, Tail
from query_optimizer.access import Access
from query_optimizer.plan import Plan

OVERLAY = "overlay"


class Part(NamedTuple):
    """A segment's view, the overlay or the tail, as a plan may search it: `span`, by one of `kinds`.

    segment: None for the overlay and the tail. shift: how far the view was moved. overlaid: tokens of it that the overlay stands
    for. view: its number among the session's views.
    """

    name: str
    visible: int
    stored: int
    span: Span
    kinds: Mapping[str, Index]
    segment: Segment | None
    shift: int = 0
    overlaid: int = 0
    view: int = 0


def parts_of(config: Config, number: int, basis: Basis, run: Run, tail: Tail) -> list[Part]:
    """Everything that holds visible tokens, and what of it lies outside of the window, so that an index may be asked.

    number: of the layer.
    """
    size = tail.table.layout.block_size
    parts: list[Part] = []
    names: Counter[int] = Counter()
    first_block = 0
    overlaid = np.sort(run.overlaid)
    for i, view in enumerate(basis.views):
        begin = max(0, -(-(config.window.sink_tokens - view.begin) // size) * size)
        end = min(view.visible, run.base_tokens - config.window.recent_tokens - view.begin) // size * size
        long = end - begin >= config.indexes.segment_tokens_min
        span = Span(begin, end, first_block) if long else Span(0, 0, first_block)
        kinds = view.segment.indexes.of(number) if long else {}
        names[view.segment.number] += 1
        name = part_name(view, again=names[view.segment.number] > 1)
        hidden = int(np.diff(np.searchsorted(overlaid, [view.begin, view.end]))[0]) if len(overlaid) else 0
        parts.append(Part(name, view.visible, len(view.segment), span, kinds, view.segment, view.shift, hidden, i))
        first_block += -(-view.visible // size)
    if len(overlaid):
        parts.append(Part(OVERLAY, len(overlaid), len(overlaid), Span(0, 0, first_block), {}, None))
        first_block += -(-len(overlaid) // size)
    length = tail.table.length
    if length:
        kinds = {} if tail.index is None else {KIND: tail.index}
        parts.append(Part(NAME, length, length, Span(0, tail.sealed, first_block), kinds, None))
    return parts


def sections_of(plan: Plan, parts: Mapping[str, Part], basis: Basis, run: Run, block_size: int) -> Sections:
    """How a plan divides the run."""
    searched, whole = [], []
    spans = {access.part for access in plan.accesses if access.index is not None}
    for access in plan.accesses:
        part = parts[access.part]
        span = Span(access.begin, access.end, part.span.first_block)
        if access.index is not None:
            tail = access.estimate_tail
            watched = part.segment is not None and isinstance(access.retrieval, Dipr)  # a range tells what is wanted
            observe = partial(part.segment.statistics.observe, plan.layer) if watched and part.segment is not None else None
            turn = partial(basis.moves.turned_back, view=part.view) if part.shift and basis.moves is not None else None
            hidden = run.hidden_of(part.view) if part.overlaid else None
            mask = _mask(access)
            searched.append(Searched(part.kinds[access.index], span, access.retrieval, mask, tail, observe, turn, hidden))
        elif access.part in spans and not access.all_heads:
            mask = _mask(access)
            assert mask is not None
            whole.append(ReadWhole(span, mask))
    return Sections(searched, block_size, whole)


def part_name(view: SegmentView, *, again: bool = False) -> str:
    """How a view is called in plans. again: whether an earlier view is of the same segment."""
    return f"segment {view.segment.number}" + (f" at {view.begin}" if again else "")


def _mask(access: Access) -> HeadMask | None:
    if access.all_heads:
        return None
    mask = np.zeros(access.kv_heads, np.bool_)
    mask[list(access.heads)] = True
    return mask
