"""The frame of codecs that store other rows in place of those that came: rounded ones, or what some of them have in common."""

from abc import abstractmethod

import numpy as np

import kvdb._native as _native
from kvdb.codecs.base import Rounding
from kvdb.codecs.plain import Plain
from kvdb.types import DTYPES, Addresses, Array, KeysValues, bits

BLOCKS_AT_ONCE = 64


class Changed(Plain):
    """A codec of blocks that lie as plain ones do, so that every kernel reads them; it says what the rows become."""

    @abstractmethod
    def change(self, k: Array, v: Array) -> KeysValues:
        """What is stored in place of keys and values of tokens that stand one behind the other, `[kv_heads, n, head_dim]` of the
        model's dtype; it may be of any other. n: of whole blocks, but for the last ones of a segment."""

    def encode(self, geometry: _native.Geometry, source: Addresses, n: int, target: Addresses) -> Rounding:
        roundings, size, dtype = [], BLOCKS_AT_ONCE * geometry.block_size, DTYPES[geometry.dtype.name]
        for start in range(0, n, size):
            shape = geometry.kv_heads, min(size, n - start), geometry.head_dim
            came = np.empty(shape, dtype), np.empty(shape, dtype)
            self.decode(geometry, source, start, *came)
            left = [rows.astype(dtype) for rows in self.change(*came)]
            _native.append(geometry, target, start, *map(bits, left))
            roundings.append(Rounding(*_lengths(came[0], left[0]), *_lengths(came[1], left[1])))
        return Rounding.of_all(roundings)


def _lengths(came: Array, left: Array) -> tuple[float, float]:
    """The squared lengths of what changed of some rows, and of the rows."""
    old = came.astype(np.float64)
    return float(np.square(left - old).sum()), float(np.square(old).sum())
