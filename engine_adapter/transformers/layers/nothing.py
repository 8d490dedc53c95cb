"""Layers that keep nothing: DummyLayer, of layers without attention and of those that read what an earlier layer keeps."""

from collections.abc import Sequence
from typing import Any

import kvdb
from engine_adapter.transformers.layers.base import Part


class NoLayer:
    """Nothing is stored of it."""

    padded = True
    windowed = None
    descriptions: tuple[kvdb.Attention | kvdb.State, ...] = ()

    def taken(self, _layer: Any, _row: int, _start: int, _stop: int, /) -> tuple[Part, ...]:
        return ()

    def filled(self, _layer: Any, _rows: Sequence[tuple[Part, ...]], _columns: int, /) -> None:
        """There is nothing to fill."""
