"""Layers that keep tokens and states: LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer."""

from collections.abc import Sequence
from typing import Any

from engine_adapter.transformers.layers.attention import AttentionLayer
from engine_adapter.transformers.layers.base import Part
from engine_adapter.transformers.layers.states import StateLayer


class HybridLayer:
    """Keys and values, and states beside them."""

    padded = True

    def __init__(self, attention: AttentionLayer, states: StateLayer) -> None:
        self.descriptions = (*attention.descriptions, *states.descriptions)
        self.windowed = attention.windowed
        self._attention, self._states = attention, states

    def taken(self, layer: Any, row: int, start: int, stop: int) -> tuple[Part, ...]:
        return (*self._attention.taken(layer, row, start, stop), *self._states.taken(layer, row, start, stop))

    def filled(self, layer: Any, rows: Sequence[tuple[Part, ...]], columns: int) -> None:
        self._attention.filled(layer, [row[:1] for row in rows], columns)
        self._states.filled(layer, [row[1:] for row in rows], columns)
