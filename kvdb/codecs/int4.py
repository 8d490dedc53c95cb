"""Four bits for keys and for values: 0.27 of the bytes of bfloat16.

Kernels: `Quantize` writes it and reads it back, `DecodeQuantized<4, 4>` attends over it, and `CodedRow` reads single rows.
"""

import kvdb._native as _native
from kvdb.codecs.quantized import FOUR_BITS_ERROR_MAX, QuantizedCodec


class Int4(QuantizedCodec):
    """Four bits for both."""

    name = "int4"
    representation = _native.BlockFormat.int4
    key_error_max = value_error_max = FOUR_BITS_ERROR_MAX
