"""How a plan divides the blocks of one layer into those that are searched, those that are read whole, and those that the GPU
answers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from indexes.retrieval import Dipr
from kvdb.attention.block_run import BlockRun, Span
from kvdb.attention.device import DeviceAttention
from kvdb.attention.partition import ExactSpan, HeadMask, RunPartition, SearchedSpan
from kvdb.catalog.segments.snapshot import Snapshot
from kvdb.gpu.interface import DevicePart
from kvdb.planning.parts import Part, leading_blocks
from query_optimizer.access import Access
from query_optimizer.plan import Plan

MakeDeviceAttention = Callable[[Sequence[DevicePart], bool], DeviceAttention]
"""Takes the parts that the GPU answers, and whether the tail is one of them."""


def run_partition(
    plan: Plan,
    parts: Mapping[str, Part],
    snapshot: Snapshot,
    run: BlockRun,
    block_size: int,
    make_device: MakeDeviceAttention | None = None,
    sink_tokens: int = 0,
) -> RunPartition:
    """How a plan divides the run. make_device: makes the object that answers the parts on the GPU; None without one. sink_tokens:
    the number of first tokens that are left out where a range begins at the largest score behind them."""
    searched: list[SearchedSpan] = []
    whole: list[ExactSpan] = []
    device_parts: list[DevicePart] = []
    searched_parts = {access.part for access in plan.accesses if access.index is not None}
    for access in plan.accesses:
        part = parts[access.part]
        heads = _head_mask(access)
        if part.slots is not None:
            device_parts.append(device_part(access, part, snapshot, run, block_size))
        elif part.on_gpu:
            continue  # the tail, which grows
        elif access.index is not None:
            searched.append(_searched_span(access, part, heads, plan.layer, snapshot, run))
        elif access.part in searched_parts and heads is not None:
            whole.append(ExactSpan(Span(access.begin, access.end, part.span.first_block), heads))
    tail = any(part.on_gpu and part.slots is None for part in parts.values())
    device = make_device(device_parts, tail) if make_device is not None and (device_parts or tail) else None
    sinks = _sink_blocks(snapshot, run, block_size, sink_tokens) if searched else []
    return RunPartition(searched, block_size, whole, device, sinks)


def device_part(access: Access, part: Part, snapshot: Snapshot, run: BlockRun, block_size: int) -> DevicePart:
    """The part of a view that the GPU answers."""
    assert part.slots is not None
    span = Span(access.begin, access.end, part.span.first_block)
    first, last = access.begin // block_size, -(-access.end // block_size)
    turn = int(snapshot.moves.of_view[part.view]) if part.shift and snapshot.moves is not None else -1
    hidden = run.hidden_in_blocks(span.first_block + first, span.first_block + last) if part.overlaid else None
    slots = part.slots[first:last].astype(np.int32)
    return DevicePart(span, slots, access.index, access.retrieval, turn, hidden)


def _sink_blocks(snapshot: Snapshot, run: BlockRun, block_size: int, sink_tokens: int) -> list[tuple[int, int]]:
    """The blocks [first, last) of the run that hold tokens at positions below sink_tokens. The other tokens of the same blocks go
    with them."""
    found = []
    for view, blocks in zip(snapshot.views, run.views, strict=True):
        last = min(blocks.start + leading_blocks(sink_tokens - view.begin, block_size), blocks.stop)
        found.append((blocks.start, last))
    first = sum(-(-view.visible // block_size) for view in snapshot.views)
    overlaid = np.unique(np.flatnonzero(run.overlaid < sink_tokens) // block_size) + first
    found += [(block, block + 1) for block in overlaid.tolist()]
    tail = leading_blocks(sink_tokens - run.base_tokens, block_size)
    found.append((run.base_blocks, min(run.base_blocks + tail, run.blocks)))
    return [(begin, end) for begin, end in found if begin < end]


def _searched_span(
    access: Access, part: Part, heads: HeadMask | None, layer: int, snapshot: Snapshot, run: BlockRun
) -> SearchedSpan:
    assert access.index is not None
    segment, moves = part.segment, snapshot.moves
    observed = segment is not None and isinstance(access.retrieval, Dipr)  # only a range shows how much a head needs
    return SearchedSpan(
        index=part.kinds[access.index],
        span=Span(access.begin, access.end, part.span.first_block),
        retrieval=access.retrieval,
        active_heads=heads,
        estimate_tail=access.estimate_tail,
        observe=partial(segment.statistics.observe, layer) if segment is not None and observed else None,
        turn=moves.turn_of(part.view) if part.shift and moves is not None else None,
        hidden=run.hidden_in_view(part.view) if part.overlaid else None,
    )


def _head_mask(access: Access) -> HeadMask | None:
    """The KV heads of an access, bool `[kv_heads]`; None for all."""
    if access.all_heads:
        return None
    mask = np.zeros(access.kv_heads, np.bool_)
    mask[list(access.heads)] = True
    return mask
