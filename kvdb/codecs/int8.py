"""Eight bits for keys and for values: 0.52 of the bytes of bfloat16.

Kernels: `Quantize` writes it and reads it back, `DecodeQuantized<8, 8>` attends over it, and `CodedRow` reads single rows.
"""

import kvdb._native as _native
from kvdb.codecs.quantized import EIGHT_BITS_ERROR_MAX, QuantizedCodec


class Int8(QuantizedCodec):
    """Eight bits for both."""

    name = "int8"
    representation = _native.BlockFormat.int8
    key_error_max = value_error_max = EIGHT_BITS_ERROR_MAX
