"""The parts of one layer of a session, which hold its visible tokens: segment views, the overlay and the tail."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from indexes.base import Index
from kvdb.attention.block_run import BlockRun, Span
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import SegmentView
from kvdb.catalog.segments.snapshot import Snapshot
from kvdb.catalog.segments.tail import KIND, NAME, Tail
from kvdb.config import Config
from kvdb.gpu.interface import TIER as GPU
from kvdb.gpu.interface import GpuInterface
from kvdb.gpu.mirror import Mirror
from kvdb.storage.tier import Blocks
from kvdb.types import LayerShape

OVERLAY = "overlay"
CPU = "cpu"


class Part(NamedTuple):
    """A place that holds tokens: a segment's view, the overlay or the tail. A plan may search its `span` with one of `kinds`.

    visible: the number of its `stored` tokens that the session sees. segment: None for the overlay and the tail. shift: by how
    many positions the view was moved. overlaid: the number of its tokens that the overlay replaces. view: its number among the
    session's views. tier: where it is read. slots: int64, where the copies of its blocks lie on the GPU; None on the CPU, and for
    a tail on the GPU, which takes its slots as it grows.
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
    tier: str = CPU
    slots: Blocks | None = None

    def token_nbytes(self, layer: int, shape: LayerShape) -> int:
        """The bytes of one of its tokens in a layer of that shape, as they lie."""
        return shape.token_nbytes if self.segment is None else self.segment.tables[layer].layout.token_nbytes

    @property
    def on_gpu(self) -> bool:
        return self.tier == GPU


def parts_of(
    config: Config, layer: int, snapshot: Snapshot, run: BlockRun, tail: Tail, gpu: GpuInterface | None = None
) -> list[Part]:
    """Every part of a layer, with the span of it that lies outside of the window, so that an index may search it.

    gpu: it answers the blocks that have copies there; a view with copies of only some blocks becomes two parts.
    """
    size = tail.table.layout.block_size
    parts: list[Part] = []
    names: Counter[int] = Counter()
    first_block = 0
    overlaid = np.sort(run.overlaid)
    for i, view in enumerate(snapshot.views):
        begin = leading_blocks(config.window.sink_tokens - view.begin, size) * size
        end = min(view.visible, run.base_tokens - config.window.recent_tokens - view.begin) // size * size
        long = end - begin >= config.indexes.segment_tokens_min
        span = Span(begin, end, first_block) if long else Span(0, 0, first_block)
        kinds = view.segment.indexes.of(layer) if long else {}
        names[view.segment.number] += 1
        name = part_name(view, again=names[view.segment.number] > 1)
        hidden = int(np.diff(np.searchsorted(overlaid, [view.begin, view.end]))[0]) if len(overlaid) else 0
        part = Part(name, view.visible, len(view.segment), span, kinds, view.segment, view.shift, hidden, i)
        mirror = None if gpu is None else gpu.mirror(view.segment)
        parts += [part] if mirror is None else _split(part, mirror, layer, size, config.indexes.segment_tokens_min)
        first_block += -(-view.visible // size)
    if len(overlaid):
        parts.append(Part(OVERLAY, len(overlaid), len(overlaid), Span(0, 0, first_block), {}, None))
        first_block += -(-len(overlaid) // size)
    if tail.table.length:
        parts.append(_tail_part(config, run, tail, first_block, gpu))
    return parts


def leading_blocks(tokens: int, block_size: int) -> int:
    """The number of blocks that hold `tokens` tokens; 0 for a negative number."""
    return max(0, -(-tokens // block_size))


def part_name(view: SegmentView, *, again: bool = False) -> str:
    """The name of a view in plans. again: whether an earlier view shows the same segment."""
    return f"segment {view.segment.number}" + (f" at {view.begin}" if again else "")


def _tail_part(config: Config, run: BlockRun, tail: Tail, first_block: int, gpu: GpuInterface | None) -> Part:
    """The tail; if the GPU has a copy, all of it is read there."""
    length, size = tail.table.length, tail.table.layout.block_size
    if gpu is not None and tail.copy is not None and not tail.copy.full:
        return Part(NAME, length, length, Span(0, 0, first_block), _tail_kinds(tail), None, tier=GPU)
    begin = min(leading_blocks(config.window.sink_tokens - run.base_tokens, size) * size, tail.sealed)
    return Part(NAME, length, length, Span(begin, tail.sealed, first_block), _tail_kinds(tail), None)


def _tail_kinds(tail: Tail) -> Mapping[str, Index]:
    return {} if tail.index is None else {KIND: tail.index}


def _split(part: Part, mirror: Mirror, layer: int, block_size: int, tokens_min: int) -> list[Part]:
    """A view with copies on the GPU, as the part without copies and the part with them. tokens_min: shorter parts are not
    searched."""
    cut, span = mirror.first_token, part.span
    if cut >= part.visible:
        return [part]
    blocks = -(-part.visible // block_size) - mirror.first
    begin, end = max(0, span.begin - cut), span.end - cut
    there = (begin, end) if end - begin >= tokens_min else (0, 0)
    on_gpu = part._replace(
        name=part.name if not cut else f"{part.name} from {cut}",
        visible=part.visible - cut,
        stored=part.stored - cut,
        span=Span(*there, span.first_block + mirror.first),
        kinds={},
        tier=GPU,
        slots=mirror.slots[layer, :blocks],
    )
    if not cut:
        return [on_gpu]
    here = (span.begin, min(span.end, cut)) if min(span.end, cut) - span.begin >= tokens_min else (0, 0)
    kinds = part.kinds if here[1] else {}
    return [part._replace(visible=cut, stored=cut, span=Span(*here, span.first_block), kinds=kinds), on_gpu]
