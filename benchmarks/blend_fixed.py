"""Strategies of recompute that know all tokens from the start; `blend_quality.py` compares them with the default one."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from kvdb.blend.schedule import Flags
from kvdb.blend.strategies import Positions, Recompute, Spans
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
