"""Recompute tokens drawn by chance: a control for the other strategies."""

from __future__ import annotations

import numpy as np

from benchmarks.blend_fixed import Fixed, tokens_of
from kvdb.blend.schedule import Flags
from kvdb.blend.strategies import Spans, inside


class Random(Fixed):
    """Each token as likely as any other, the same ones for the same chunks."""

    seed = 0

    def chosen(self, spans: Spans, total: int, ratio: float) -> Flags:
        flags = np.zeros(total, np.bool_)
        positions = np.flatnonzero(inside(spans, total))
        flags[np.random.default_rng(self.seed).permutation(positions)[: tokens_of(len(positions), ratio)]] = True
        return flags
