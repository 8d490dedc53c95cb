"""What holds the visible tokens of one layer of a session, and how a plan divides it."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from indexes.base import Index
from indexes.retrieval import Dipr
from kvdb.attention.run import Run
from kvdb.attention.sections import HeadMask, ReadWhole, Searched, Sections, Span
from kvdb.catalog.segment import Segment, Views
from kvdb.config import Config
from kvdb.tail import KIND, NAME, Tail
from query_optimizer.access import Access
from query_optimizer.plan import Plan


class Part(NamedTuple):
    """A segment's view or the tail, as a plan may search it: `span`, by one of `kinds`. segment: None for the tail."""

    name: str
    visible: int
    stored: int
    span: Span
    kinds: Mapping[str, Index]
    segment: Segment | None


def parts_of(config: Config, number: int, views: Views, run: Run, tail: Tail) -> list[Part]:
    """Everything that holds visible tokens, and what of it lies outside of the window, so that an index may be asked.

    number: of the layer.
    """
    size = tail.table.layout.block_size
    parts = []
    base = first_block = 0
    for view in views:
        begin = max(0, -(-(config.window.sink_tokens - base) // size) * size)
        end = min(view.visible, run.base_tokens - config.window.recent_tokens - base) // size * size
        long = end - begin >= config.indexes.segment_tokens_min
        span = Span(begin, end, first_block) if long else Span(0, 0, first_block)
        kinds = view.segment.indexes.of(number) if long else {}
        parts.append(Part(part_name(view.segment), view.visible, len(view.segment), span, kinds, view.segment))
        base += view.visible
        first_block += -(-view.visible // size)
    length = tail.table.length
    if length:
        kinds = {} if tail.index is None else {KIND: tail.index}
        parts.append(Part(NAME, length, length, Span(0, tail.sealed, first_block), kinds, None))
    return parts


def sections_of(plan: Plan, parts: Mapping[str, Part], block_size: int) -> Sections:
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
            searched.append(Searched(part.kinds[access.index], span, access.retrieval, _mask(access), tail, observe))
        elif access.part in spans and not access.all_heads:
            mask = _mask(access)
            assert mask is not None
            whole.append(ReadWhole(span, mask))
    return Sections(searched, block_size, whole)


def part_name(segment: Segment) -> str:
    """How a segment is called in plans."""
    return f"segment {segment.number}"


def _mask(access: Access) -> HeadMask | None:
    if access.all_heads:
        return None
    mask = np.zeros(access.kv_heads, np.bool_)
    mask[list(access.heads)] = True
    return mask
