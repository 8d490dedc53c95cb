"""The arrays that the quantized index keeps of each key and value, with room to grow."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import indexes._native as _native
from indexes.base import Float32

CHUNK, RUNS = _native.QUANTIZED_CHUNK, _native.QUANTIZED_RUNS
NAMES = ("centres", "scales", "keys", "values", "bounds")


@dataclass
class Codes:
    """The arrays of `_native.Quantized`, which says their shapes; there may be more chunks than are in use."""

    centres: Float32
    scales: npt.NDArray[np.uint16]
    keys: npt.NDArray[np.uint8]
    values: npt.NDArray[np.uint8]
    bounds: Float32

    def __post_init__(self) -> None:
        self.native = _native.Quantized(self.centres, self.scales, self.keys, self.values, self.bounds)

    @classmethod
    def empty(cls, kv_heads: int, head_dim: int, chunks: int) -> "Codes":
        """Zeros for so many chunks."""
        return cls(
            np.zeros((chunks, kv_heads, 2 * head_dim), np.float32),
            np.zeros((chunks, kv_heads, 2 * CHUNK), np.uint16),
            np.zeros((chunks, kv_heads, CHUNK * head_dim // 2), np.uint8),
            np.zeros((chunks, kv_heads, CHUNK * value_dims(head_dim) // 2), np.uint8),
            np.zeros((chunks, kv_heads, 2 * RUNS), np.float32),
        )

    def arrays(self, chunks: int | None) -> dict[str, npt.NDArray[Any]]:
        """The first `chunks` chunks of each array by its name; all chunks for None."""
        return {name: getattr(self, name)[:chunks] for name in NAMES}

    def grown(self, tokens: int) -> "Codes":
        """The codes with room for `tokens` tokens. They grow by half at least, so that inserting stays cheap."""
        have, needed = len(self.centres), chunks_of(tokens)
        if needed <= have:
            return self
        _, kv_heads, width = self.centres.shape
        bigger = Codes.empty(kv_heads, width // 2, max(needed, have + have // 2))
        for name, array in self.arrays(None).items():
            getattr(bigger, name)[:have] = array
        return bigger

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, room to grow included."""
        return sum(array.nbytes for array in self.arrays(None).values())


def chunks_of(tokens: int) -> int:
    """How many chunks hold `tokens` tokens."""
    return -(-tokens // CHUNK)


def value_dims(head_dim: int) -> int:
    """Dimensions of a value that are kept, head_dim and what fills a vector."""
    return -(-head_dim // 16) * 16


def token_nbytes(head_dim: int, *, values: bool) -> float:
    """Bytes that a scan reads of each token of one KV head: codes and scale of its key, and of its value where `values`."""
    return head_dim / 2 + 2 + (value_dims(head_dim) / 2 + 2 if values else 0)
