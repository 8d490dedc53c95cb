"""Layers that keep keys and values of every token, or of the last ones: DynamicLayer, DynamicSlidingWindowLayer."""

from collections.abc import Sequence
from typing import Any, cast

import kvdb
from engine_adapter.transformers.layers.base import Part, Tokens, held_columns, needed_from, stacked
from engine_adapter.transformers.layers.forms import TokenForm


class AttentionLayer:
    """Keys and values of every token, or of those that a window can still see."""

    padded = True

    def __init__(self, description: kvdb.Attention, form: TokenForm) -> None:
        self.descriptions: tuple[kvdb.Attention | kvdb.State, ...] = (description,)
        self.attention = description
        self.form = form

    @property
    def windowed(self) -> "AttentionLayer | None":
        return None if self.attention.window is None else self

    def taken(self, layer: Any, row: int, start: int, stop: int) -> tuple[Part, ...]:
        length = layer.get_seq_length()
        pair = (held_columns(states[row], length, start, stop) for states in (layer.keys, layer.values))
        return (self.form.joined(*pair),)

    def filled(self, layer: Any, rows: Sequence[tuple[Part, ...]], columns: int) -> None:
        kept = columns - needed_from(self.attention, columns)
        pairs = [self.form.split(cast(Tokens, part)) for (part, *_) in rows]
        keys, values = (stacked([pair[i] for pair in pairs], kept) for i in (0, 1))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = columns
