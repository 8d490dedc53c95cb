"""What a session stands on: what is laid out where, how far it was moved, and what was recomputed of it."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvdb.attention.moves import Moves
from kvdb.attention.run import Laid, Run
from kvdb.catalog.catalog import release
from kvdb.catalog.layout import Layout
from kvdb.catalog.overlay import Overlay
from kvdb.catalog.segment import Views
from kvdb.storage.table import BlockTable
from kvdb.types import ModelSpec, Positions


@dataclass(frozen=True)
class Basis:
    """Everything before the tail. Owns one reference to each view's segment, and the overlay.

    moves, overlay: None for a prefix, whose views are exact where they stand.
    """

    layout: Layout
    moves: Moves | None = None
    overlay: Overlay | None = None

    @classmethod
    def prefix(cls, views: Views) -> "Basis":
        """Views that stand where they were computed, without gaps."""
        return cls(Layout.behind_each_other(views))

    @classmethod
    def laid_out(cls, spec: ModelSpec, layout: Layout, overlay: Overlay) -> "Basis":
        """Takes over the references to the views and the overlay, also when it raises Unsupported, for a spec whose keys cannot
        be moved."""
        with ExitStack() as undo:
            undo.callback(release, layout.views)
            undo.callback(overlay.release)
            basis = cls(layout, Moves(spec, [view.shift for view in layout.views]), overlay)
            undo.pop_all()
        return basis

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
        """How many tokens of chunks lie in which tier."""
        found: Counter[str] = Counter()
        chunks = {part.begin for part in self.layout.placed if part.kind == "chunk"}
        for view in self.views:
            if view.begin in chunks:
                found["cpu" if view.segment.resident else "disk"] += view.visible
        return dict(found)

    def describe(self, number: int) -> str:
        """One layer of what was laid out, for EXPLAIN."""
        kinds = Counter[str]()
        for part in self.layout.placed:
            kinds[part.kind] += part.tokens
        chunks = sum(part.kind == "chunk" for part in self.layout.placed)
        fresh = np.isin(self.overlaid(number), self.layout.gaps)
        anew, filled = int((~fresh).sum()), int(fresh.sum())
        share = f" ({anew / kinds['chunk']:.1%})" if kinds["chunk"] else ""
        parts = [f"{chunks:,} chunks of {kinds['chunk']:,} tokens, {anew:,} recomputed in this layer{share}"]
        parts += [f"{filled:,} fresh"] if filled else []
        parts += [f"{kinds['prefix']:,} of a prefix"] if kinds["prefix"] else []
        return ", ".join(parts)

    def run(self, number: int, tail: BlockTable) -> Run:
        """What one layer of a session reads."""
        parts = [(view.segment.tables[number], view.visible) for view in self.views]
        if self.moves is None or self.overlay is None:
            return Run(parts, tail)
        begins = [view.begin for view in self.views]
        run = Run(parts, tail, Laid(begins, self.layout.length, self.moves, self.overlay.tables[number]))
        run.lay(self.overlaid(number))
        return run

    def wait(self, number: int) -> None:
        """Until that layer of every segment is in main memory. Raises IntegrityError or Unavailable."""
        for view in self.views:
            view.segment.wait(number)

    def share(self) -> "Basis":
        """Another basis over the same blocks."""
        for view in self.views:
            view.segment.retain()
        return Basis(self.layout, self.moves, None if self.overlay is None else self.overlay.share())

    def release(self) -> None:
        """Give everything back."""
        release(self.views)
        if self.overlay is not None:
            self.overlay.release()
