"""Recompute the first tokens of each chunk, as EPIC's LegoLink does (arXiv 2410.15332)."""

from __future__ import annotations

import numpy as np

from benchmarks.blend_fixed import Fixed, tokens_of
from kvdb.blend.schedule import Flags
from kvdb.blend.strategies import Spans


class First(Fixed):
    """The first k tokens of each chunk, k from the ratio.

    Short chunks give to longer ones what they do not need, and a rest that is no token for each goes to the first. A chunk at
    position 0 takes what the others leave: nothing stands before it, so its KV is right already.
    """

    def chosen(self, spans: Spans, total: int, ratio: float) -> Flags:
        begins = np.array([begin for begin, _ in spans], np.int64)
        lengths = np.array([end - begin for begin, end in spans], np.int64)
        taken = np.zeros_like(lengths)
        left = tokens_of(int(lengths.sum()), ratio)
        for served in (begins > 0, begins == 0):
            while left and (open_ := np.flatnonzero(served & (taken < lengths))).size:
                each = min(left // len(open_), int((lengths - taken)[open_].min()))
                takers = open_ if each else open_[:left]
                taken[takers] += max(each, 1)
                left -= max(each, 1) * len(takers)
        flags = np.zeros(total, np.bool_)
        for begin, count in zip(begins, taken, strict=True):
            flags[begin : begin + count] = True
        return flags
