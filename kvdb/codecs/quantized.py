"""The frame of codecs that hold each number as a code of a few bits.

Numbers are rotated first, so that no channel stands out, and coded relative to the mean of their channel in the block, with a
scale for each key and each value (`_native.quantize`). Attention multiplies the codes as they lie, and never decodes them.
"""

import kvdb._native as _native
from kvdb.codecs.base import Codec, Rounding
from kvdb.types import Addresses, Array, bits

EIGHT_BITS_ERROR_MAX = 0.01
FOUR_BITS_ERROR_MAX = 0.13
"""The largest relative errors. Rounding to 2^b - 1 steps of a row's range, which is some five to six deviations of 128 numbers,
leaves 6 / (2^b - 1) / sqrt(12): 0.007 and 0.115."""


class QuantizedCodec(Codec):
    """A codec of `_native.quantize`; its representation says how many bits a key and a value have."""

    block_tokens = 16

    def encode(self, geometry: _native.Geometry, source: Addresses, n: int, target: Addresses) -> Rounding:
        return Rounding(*_native.quantize(geometry, self.representation, source, n, target))

    def decode(self, geometry: _native.Geometry, source: Addresses, start: int, k: Array, v: Array) -> None:
        _native.dequantize(geometry, self.representation, source, start, k.shape[1], bits(k), bits(v))

    def copy_first(self, geometry: _native.Geometry, source: int, n: int, target: int) -> None:
        """See `Codec.copy_first`. Behind the first n tokens stand zeros."""
        _native.cut(geometry, self.representation, source, n, target)
