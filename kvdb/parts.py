"""What holds the visible tokens of one layer of a session, and how a plan divides it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from indexes.base import Index
from indexes.retrieval import Dipr
from kvdb.attention.away import Away
from kvdb.attention.run import Run
from kvdb.attention.sections import HeadMask, ReadWhole, Searched, Sections
from kvdb.attention.span import Span
from kvdb.basis import Basis
from kvdb.catalog.segment import Segment, SegmentView
from kvdb.config import Config
from kvdb.gpu.mirror import Mirror
from kvdb.gpu.side import TIER as GPU
from kvdb.gpu.side import AwayPart, GpuSide
from kvdb.storage.tier import Blocks
from kvdb.tail import KIND, NAME, Tail
from query_optimizer.access import Access
from query_optimizer.plan import Plan

OVERLAY = "overlay"
CPU = "cpu"
NO_SLOTS: Blocks = np.zeros(0, np.int64)
"""Of a tail on the GPU, which takes its slots as it grows."""
ToAway = Callable[[Sequence[AwayPart], bool], Away]
"""Takes the parts, and whether the tail goes with them."""


class Part(NamedTuple):
    """A segment's view, the overlay or the tail, as a plan may search it: `span`, by one of `kinds`.

    segment: None for the overlay and the tail. shift: how far the view was moved. overlaid: tokens of it that the overlay stands
    for. view: its number among the session's views. slots: int64, where the copies of its blocks lie on the GPU, where they do.
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
    slots: Blocks | None = None

    @property
    def tier(self) -> str:
        """Where it is read."""
        return CPU if self.slots is None else GPU


def parts_of(config: Config, number: int, basis: Basis, run: Run, tail: Tail, gpu: GpuSide | None = None) -> list[Part]:
    """Everything that holds visible tokens, and what of it lies outside of the window, so that an index may be asked.

    number: of the layer. gpu: answers for the blocks that have copies there; a view of which some have is two parts.
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
        part = Part(name, view.visible, len(view.segment), span, kinds, view.segment, view.shift, hidden, i)
        mirror = None if gpu is None else gpu.mirror(view.segment)
        parts += [part] if mirror is None else _divided(part, mirror, number, size, config.indexes.segment_tokens_min)
        first_block += -(-view.visible // size)
    if len(overlaid):
        parts.append(Part(OVERLAY, len(overlaid), len(overlaid), Span(0, 0, first_block), {}, None))
        first_block += -(-len(overlaid) // size)
    length = tail.table.length
    if length:
        kinds = {} if tail.index is None else {KIND: tail.index}
        slots = None if gpu is None or tail.copy is None or tail.copy.full else NO_SLOTS
        sealed = tail.sealed if slots is None else 0  # there all of it is read
        parts.append(Part(NAME, length, length, Span(0, sealed, first_block), kinds, None, slots=slots))
    return parts


def _divided(part: Part, mirror: Mirror, layer: int, size: int, least: int) -> list[Part]:
    """A view that the GPU has copies of: those of its tokens that have none, and the others. least: tokens worth a search."""
    cut, span = mirror.token(), part.span
    if cut >= part.visible:
        return [part]
    blocks = -(-part.visible // size) - mirror.first
    begin, end = max(0, span.begin - cut), span.end - cut
    there = (begin, end) if end - begin >= least else (0, 0)
    slots = mirror.slots[layer, :blocks]
    on_gpu = part._replace(
        name=part.name if not cut else f"{part.name} from {cut}",
        visible=part.visible - cut,
        stored=part.stored - cut,
        span=Span(*there, span.first_block + mirror.first),
        kinds={},
        slots=slots,
    )
    if not cut:
        return [on_gpu]
    here = (span.begin, min(span.end, cut)) if min(span.end, cut) - span.begin >= least else (0, 0)
    kinds = part.kinds if here[1] else {}
    return [part._replace(visible=cut, stored=cut, span=Span(*here, span.first_block), kinds=kinds), on_gpu]


def sections_of(
    plan: Plan, parts: Mapping[str, Part], basis: Basis, run: Run, block_size: int, to_away: ToAway | None = None
) -> Sections:
    """How a plan divides the run. to_away: what takes over the parts that the GPU answers; None without one."""
    searched, whole, away = [], [], []
    spans = {access.part for access in plan.accesses if access.index is not None}
    for access in plan.accesses:
        part = parts[access.part]
        span = Span(access.begin, access.end, part.span.first_block)
        if part.slots is not None:
            away.append(away_part(access, part, basis, run, block_size))
        elif access.index is not None:
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
    tail = any(part.slots is NO_SLOTS for part in parts.values())
    taken = [part for part in away if part is not None]
    return Sections(searched, block_size, whole, to_away(taken, tail) if to_away is not None and (taken or tail) else None)


def away_part(access: Access, part: Part, basis: Basis, run: Run, block_size: int) -> AwayPart | None:
    """What the GPU answers of a view; None for the tail, which is no fixed stretch."""
    span = Span(access.begin, access.end, part.span.first_block)
    assert part.slots is not None
    if part.slots is NO_SLOTS:
        return None
    first, last = access.begin // block_size, -(-access.end // block_size)
    turn = int(basis.moves.of_view[part.view]) if part.shift and basis.moves is not None else -1
    hidden = run.words(span.first_block + first, span.first_block + last) if part.overlaid else None
    slots = part.slots[first:last].astype(np.int32)
    return AwayPart(span, slots, access.index, access.retrieval, turn, hidden)


def part_name(view: SegmentView, *, again: bool = False) -> str:
    """How a view is called in plans. again: whether an earlier view is of the same segment."""
    return f"segment {view.segment.number}" + (f" at {view.begin}" if again else "")


def _mask(access: Access) -> HeadMask | None:
    if access.all_heads:
        return None
    mask = np.zeros(access.kv_heads, np.bool_)
    mask[list(access.heads)] = True
    return mask
