"""Strategies of recompute that know all tokens from the start; `blend_quality.py` compares them with the default one."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from kvdb.blend.schedule import Flags
from kvdb.blend.strategies import Positions, Recompute, Spans, inside
from kvdb.types import Float32


class Fixed(ABC):
    """The frame of such a strategy: `chosen` says which tokens are computed, in every layer alike."""

    def __init__(self, options: Recompute, spans: Spans, total: int, layers: int) -> None:
        del layers
        self._flags = self.chosen(spans, total, options.share)

    @abstractmethod
    def chosen(self, spans: Spans, total: int, ratio: float) -> Flags:
        """bool `[total]`: the share `ratio` of the tokens in the chunks at spans [begin, end)."""

    def start(self) -> Flags:
        return self._flags.copy()

    def checks(self, layer: int) -> bool:
        del layer
        return False

    def goes_on(self, layer: int, positions: Positions, scores: Float32) -> Flags:
        del layer, scores
        return np.ones(len(positions), np.bool_)


def tokens_of(total: int, ratio: float) -> int:
    """The whole number of tokens that is nearest to a share of them."""
    return int(np.rint(ratio * total))


class First(Fixed):
    """The first k tokens of each chunk, k from the ratio, as EPIC's LegoLink does (arXiv 2410.15332).

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


class Random(Fixed):
    """Each token as likely as any other, the same ones for the same chunks: a control for the other strategies."""

    seed = 0

    def chosen(self, spans: Spans, total: int, ratio: float) -> Flags:
        flags = np.zeros(total, np.bool_)
        positions = np.flatnonzero(inside(spans, total))
        flags[np.random.default_rng(self.seed).permutation(positions)[: tokens_of(len(positions), ratio)]] = True
        return flags
