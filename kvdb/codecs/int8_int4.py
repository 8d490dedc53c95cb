"""Eight bits for keys, which decide what is attended, and four for values: 0.40 of the bytes of bfloat16.

Kernels: `Quantize` writes it and reads it back, `DecodeQuantized<8, 4>` attends over it, and `CodedRow` reads single rows.
"""

import kvdb._native as _native
from kvdb.codecs.int4 import Int4
from kvdb.codecs.quantized import EIGHT_BITS_ERROR_MAX, FOUR_BITS_ERROR_MAX, QuantizedCodec


class Int8Int4(QuantizedCodec):
    """Keys as in `Int8`, values as in `Int4`."""

    name = "int8-int4"
    representation = _native.BlockFormat.int8_int4
    key_error_max = EIGHT_BITS_ERROR_MAX
    value_error_max = FOUR_BITS_ERROR_MAX

    def value_nbytes(self, geometry: _native.Geometry) -> int:
        """See `Codec.value_nbytes`. Values lie as in `Int4`."""
        return Int4().value_nbytes(geometry)
