"""How much space stored contexts take, beside the least that what they name can take."""

from collections import defaultdict
from collections.abc import Sequence

from kvdb.catalog.compaction.reachable import reachable_blocks
from kvdb.catalog.contexts.context import StoredContext
from kvdb.catalog.segments.segment import Segment
from kvdb.storage.block_layout import BlockLayout
from kvdb.types import Space, Tokens


def space_of(contexts: Sequence[StoredContext]) -> Space:
    """The space of these contexts, which the caller holds. Their texts are compared, which takes time with their number."""
    texts: defaultdict[tuple[str, str, int, BlockLayout], list[Tokens]] = defaultdict(list)
    segments: set[Segment] = set()
    apart: dict[Segment, int] = {}  # how much of those that are not found by their texts is seen
    overlaid = 0
    for context in contexts:
        segments.update(view.segment for view in context.views)
        overlaid += 0 if context.overlay is None else context.overlay.nbytes
        if context.plain and context.views:
            key = context.spec.digest, context.salt, context.spec.layers, context.views[0].segment.tables[0].layout
            texts[key].append(context.tokens)
            continue
        for view in context.views:
            apart[view.segment] = max(view.visible, apart.get(view.segment, 0))
    found = {view.segment for context in contexts if context.plain for view in context.views}
    reachable = overlaid
    for (_, _, layers, layout), listed in texts.items():
        reachable += layers * reachable_blocks(listed, layout.block_size) * layout.nbytes
    for segment, visible in apart.items():
        if segment not in found:
            layout = segment.tables[0].layout
            reachable += len(segment.tables) * layout.blocks_for(visible) * layout.nbytes
    return Space(overlaid + sum(segment.nbytes for segment in segments), reachable)
