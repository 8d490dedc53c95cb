"""The stored tokens below a session: their layout, how far each was moved, and which were recomputed."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvdb.attention.block_run import BlendedViews, BlockRun
from kvdb.blend.rope_shift import RopeShifts
from kvdb.catalog.segments.layout import ContextLayout
from kvdb.catalog.segments.overlay import Overlay
from kvdb.catalog.segments.segment_view import Views, release_views
from kvdb.storage.block_table import BlockTable
from kvdb.storage.paged_segment import PagedLayer
from kvdb.types import ModelSpec, Positions


@dataclass(frozen=True)
class Snapshot:
    """Everything before a session's tail. It owns one reference to each view's segment, and the overlay.

    moves, overlay: the rotations of moved views, and the recomputed tokens; None for a prefix, whose views are exact where they
    stand.
    """

    layout: ContextLayout
    moves: RopeShifts | None = None
    overlay: Overlay | None = None

    @classmethod
    def prefix(cls, views: Views) -> "Snapshot":
        """Views that stand where they were computed, without gaps."""
        return cls(ContextLayout.contiguous(views))

    @classmethod
    def blended(cls, spec: ModelSpec, layout: ContextLayout, overlay: Overlay) -> "Snapshot":
        """Views that stand anywhere, with gaps. Takes over the references to the views and the overlay, which is loaded where it
        lies in a file, also when it raises Unsupported, for a spec whose keys cannot be moved, or what `Overlay.loaded` does."""
        with ExitStack() as undo:
            undo.callback(release_views, layout.views)
            undo.callback(overlay.release)
            snapshot = cls(layout, RopeShifts(spec, [view.shift for view in layout.views]), overlay.loaded())
            undo.pop_all()
        return snapshot

    @property
    def views(self) -> Views:
        return self.layout.views

    def overlaid(self, number: int) -> Positions:
        """The positions of one layer that are overlaid, in the order of the overlay's rows."""
        assert self.overlay is not None
        return self.overlay.positions[number]

    def missing(self, number: int) -> Positions:
        """The gaps of one layer that are not overlaid."""
        if self.overlay is None or not len(self.layout.gaps):
            return self.layout.gaps
        return np.setdiff1d(self.layout.gaps, self.overlaid(number), assume_unique=True)

    def tiers(self) -> dict[str, int]:
        """The number of tokens of chunks in each tier, "cpu" or "disk"."""
        tokens: Counter[str] = Counter()
        chunks = {part.begin for part in self.layout.placed if part.kind == "chunk"}
        for view in self.views:
            if view.begin in chunks:
                tokens["cpu" if view.segment.resident else "disk"] += view.visible
        return dict(tokens)

    def describe(self, number: int) -> str:
        """Lines of EXPLAIN that describe the blended layout of one layer."""
        kinds = Counter[str]()
        for part in self.layout.placed:
            kinds[part.kind] += part.tokens
        chunks = sum(part.kind == "chunk" for part in self.layout.placed)
        fresh = np.isin(self.overlaid(number), self.layout.gaps)
        recomputed, filled = int((~fresh).sum()), int(fresh.sum())
        share = f" ({recomputed / kinds['chunk']:.1%})" if kinds["chunk"] else ""
        parts = [f"{chunks:,} chunks of {kinds['chunk']:,} tokens, {recomputed:,} recomputed in this layer{share}"]
        parts += [f"{filled:,} fresh"] if filled else []
        parts += [f"{kinds['prefix']:,} of a prefix"] if kinds["prefix"] else []
        return ", ".join(parts)

    def run(self, number: int, tail: BlockTable) -> BlockRun:
        """The blocks that one layer of a session reads, its tail last."""
        parts = [(view.segment.tables[number], view.visible) for view in self.views]
        if self.moves is None or self.overlay is None:
            return BlockRun(parts, tail)
        begins = [view.begin for view in self.views]
        run = BlockRun(parts, tail, BlendedViews(begins, self.layout.length, self.moves, self.overlay.tables[number]))
        run.update_overlay(self.overlaid(number))
        return run

    def wait(self, number: int) -> None:
        """Wait until that layer of every segment is in main memory. Raises IntegrityError or Unavailable."""
        for view in self.views:
            view.segment.wait(number)

    def cut(self, tokens: int) -> "Snapshot":
        """Another snapshot, of the first `tokens` positions over the same blocks. Raises CapacityError where rows of the overlay
        have to be copied and there is no room."""
        overlay = None if self.overlay is None else self.overlay.cut(tokens)
        layout = self.layout.cut(tokens)
        for view in layout.views:
            view.segment.retain()
        return Snapshot(layout, None if self.moves is None else self.moves.of_first(len(layout.views)), overlay)

    def pages(self, number: int) -> tuple[PagedLayer, ...]:
        """That layer of the paged segments, which has to be pinned while it is read; the segments are pinned already."""
        paged = [view.segment.paged for view in self.views]
        return tuple(segment.layers[number] for segment in paged if segment is not None)

    def share(self) -> "Snapshot":
        """Another snapshot over the same blocks."""
        for view in self.views:
            view.segment.retain()
        return Snapshot(self.layout, self.moves, None if self.overlay is None else self.overlay.share())

    def release(self) -> None:
        """Give everything back."""
        release_views(self.views)
        if self.overlay is not None:
            self.overlay.release()
