"""Keys and values as they came, in the model's dtype. All kernels of `_native` read it."""

import numpy as np

import kvdb._native as _native
from kvdb.codecs.base import Codec, Rounding
from kvdb.types import DTYPES, Addresses, Array, bits


class Plain(Codec):
    """Every key and value is a row."""

    name = ""
    representation = _native.BlockFormat.raw
    key_error_max = value_error_max = 0.0

    def value_nbytes(self, geometry: _native.Geometry) -> int:
        """See `Codec.value_nbytes`. Values may be shorter than keys, or lie in them."""
        itemsize = DTYPES[geometry.dtype.name].itemsize
        return geometry.kv_heads * geometry.block_size * geometry.value_dim * itemsize

    def encode(self, geometry: _native.Geometry, source: Addresses, n: int, target: Addresses) -> Rounding:
        _native.copy(geometry, source, 0, target, 0, n)
        return Rounding.of_all(())

    def decode(self, geometry: _native.Geometry, source: Addresses, start: int, k: Array, v: Array) -> None:
        _native.gather(geometry, source, start, k.shape[1], bits(k), bits(v))

    def copy_first(self, geometry: _native.Geometry, source: int, n: int, target: int) -> None:
        _native.copy(geometry, np.array([source], np.uint64), 0, np.array([target], np.uint64), 0, n)
