"""Layers that keep keys of an indexer beside their keys and values, or nothing but these: DynamicIndexedLayer of DeepSeek-V3.2,
GLM-5 and Mistral-Large-4, and the sparse layers of MiniMax-M3."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

from torch import Tensor

import kvdb
from engine_adapter.transformers.layers.attention import AttentionLayer
from engine_adapter.transformers.layers.base import Part, Tokens, stacked
from engine_adapter.transformers.layers.forms import TokenForm


class IndexerKeys(Protocol):
    """Where a layer has its indexer's keys."""

    def of(self, layer: Any) -> Tensor | None:
        """`[rows, 1, n, dim]`, None where there are none."""
        ...

    def put(self, layer: Any, keys: Tensor) -> None:
        """Give a layer that has none all of them."""
        ...

    @property
    def padded(self) -> bool:
        """What `LayerKind.padded` says."""
        ...


class Dsa:
    """A DynamicIndexedLayer's, `[rows, n, dim]`."""

    padded = True

    def of(self, layer: Any) -> Tensor | None:
        return None if layer.indexer_keys is None else layer.indexer_keys.unsqueeze(1)

    def put(self, layer: Any, keys: Tensor) -> None:
        layer.lazy_initialization_indexer(keys[:, 0])
        layer.indexer_keys = keys[:, 0]


class MiniMax:
    """A MiniMaxM3VLSparseCacheLayer's, `[rows, 1, n, dim]`. The model selects blocks of columns, whose borders padding moves."""

    padded = False

    def of(self, layer: Any) -> Tensor | None:
        return cast(Tensor | None, layer.idx_keys)

    def put(self, layer: Any, keys: Tensor) -> None:
        layer.idx_keys = keys


class IndexedLayer(AttentionLayer):
    """Keys and values of every token, and the keys by which the model selects among them."""

    def __init__(self, description: kvdb.Attention, form: TokenForm, keys: IndexerKeys) -> None:
        super().__init__(description, form)
        self.padded = keys.padded
        self._keys = keys

    def taken(self, layer: Any, row: int, start: int, stop: int) -> tuple[Part, ...]:
        (kv,) = super().taken(layer, row, start, stop)
        keys = self._keys.of(layer)
        assert keys is not None
        return (cast(Tokens, kv)._replace(indexer=keys[row, :, start:stop]),)

    def filled(self, layer: Any, rows: Sequence[tuple[Part, ...]], columns: int) -> None:
        super().filled(layer, rows, columns)
        self._keys.put(layer, stacked([cast(Tensor, cast(Tokens, part).indexer) for (part, *_) in rows], columns))


class IndexerAlone:
    """A layer that reads another's keys and values, and selects among them with an indexer of its own (Mistral-Large-4)."""

    padded = True
    windowed = None

    def __init__(self, description: kvdb.Attention, keys: IndexerKeys) -> None:
        self.descriptions: tuple[kvdb.Attention | kvdb.State, ...] = (description,)
        self._keys = keys

    def taken(self, layer: Any, row: int, start: int, stop: int) -> tuple[Part, ...]:
        keys = self._keys.of(layer)
        assert keys is not None
        return (Tokens(keys[row, :, start:stop]),)

    def filled(self, layer: Any, rows: Sequence[tuple[Part, ...]], columns: int) -> None:
        self._keys.put(layer, stacked([cast(Tokens, part).k for (part, *_) in rows], columns))
