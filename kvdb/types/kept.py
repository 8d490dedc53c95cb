"""What is kept of each token of a model: one block table for a layer's keys and values, and one for its indexer's keys."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kvdb.types.arrays import DTYPES, KeysValues
from kvdb.types.layers import Attention, Description, Indexer
from kvdb.types.rope import Rope


@dataclass(frozen=True)
class LayerShape:
    """What one block table holds, and how it is attended: of a layer's keys and values, or of its indexer's keys.

    name: the model's. head_dim: numbers of a key. value_dim: of a value, 0 for keys alone. values_in_keys: whether a value is the
    first numbers of its key. window: how many tokens a query sees, 0 for all. sinks: as in `Attention`.
    """

    name: str
    dtype: str
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    softmax_scale: float
    rope: Rope | None = None
    values_in_keys: bool = False
    window: int = 0
    sinks: bool = False

    @classmethod
    def of(cls, name: str, dtype: str, layer: Attention) -> "LayerShape":
        """That of a layer's keys and values."""
        scale = layer.key_dim**-0.5 if layer.scale is None else layer.scale
        heads = layer.q_heads, layer.kv_heads, layer.key_dim, layer.width_of_values
        return cls(name, dtype, *heads, scale, layer.rope, layer.values == "keys", layer.window or 0, layer.sinks)

    @classmethod
    def of_indexer(cls, name: str, dtype: str, indexer: Indexer) -> "LayerShape":
        """That of an indexer's keys."""
        return cls(name, dtype, indexer.heads, 1, indexer.dim, 0, indexer.dim**-0.5)

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @cached_property
    def value_width(self) -> int:
        """The numbers of a value that lie beside its key."""
        return 0 if self.values_in_keys else self.value_dim

    @cached_property
    def token_nbytes(self) -> int:
        """Bytes that one token takes."""
        return self.kv_heads * (self.head_dim + self.value_width) * self.numpy_dtype.itemsize

    def empty(self, n: int) -> KeysValues:
        """Arrays for the keys and values of n tokens: `[kv_heads, n, head_dim]` and `[kv_heads, n, value_width]`."""
        k, v = (np.empty((self.kv_heads, n, dim), self.numpy_dtype) for dim in (self.head_dim, self.value_width))
        return k, v

    @property
    def plain(self) -> bool:
        """Whether keys and values are of one size and apart, and a query sees every token and nothing else."""
        return self.value_dim == self.head_dim and not (self.values_in_keys or self.window or self.sinks)


class Kept(NamedTuple):
    """One block table of a segment or a session. layer: the number of the model's layer. what: "kv", or "indexer"."""

    layer: int
    what: str
    shape: LayerShape

    def __str__(self) -> str:
        return f"layer {self.layer}" if self.what == "kv" else f"the indexer of layer {self.layer}"


def kept_by(name: str, dtype: str, layers: tuple[Description, ...]) -> tuple[Kept, ...]:
    """What is kept of every token, in the order of the layers."""
    kept: list[Kept] = []
    for number, layer in enumerate(layers):
        if isinstance(layer, Attention):
            kept.append(Kept(number, "kv", LayerShape.of(name, dtype, layer)))
            if layer.indexer is not None:
                kept.append(Kept(number, "indexer", LayerShape.of_indexer(name, dtype, layer.indexer)))
    return tuple(kept)
