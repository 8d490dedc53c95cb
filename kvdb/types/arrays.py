"""Arrays and dtypes by the names that all rooms use."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
KeysValues = tuple[Array, Array]
"""Keys and values of tokens of one layer, both `[kv_heads, n, head_dim]` but where layers differ (`kvdb.types.layers`)."""
Tokens = npt.NDArray[np.int32]
Addresses = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def bits(array: Array) -> Array:
    """The array in the form that native code takes: 16-bit floats as uint16, float32 as it is, the last dimension contiguous.

    It is copied only where that dimension is not.
    """
    if array.strides[-1] != array.itemsize and array.size:
        array = np.ascontiguousarray(array)
    return array if array.itemsize == 4 else array.view(np.uint16)
