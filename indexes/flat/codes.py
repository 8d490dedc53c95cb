"""The arrays that the flat index keeps of each key, with room to grow."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import indexes._native as _native
from indexes.base import Float32

CHUNK = _native.FLAT_CHUNK
"""The number of keys that are coded together, relative to one centre."""
LENGTHS = 4
"""The number of lengths that are kept of each key, one plane of a chunk for each."""
NAMES = ("centres", "lengths", "high", "low", "signs", "longest")


@dataclass
class Codes:
    """The arrays of `_native.Flat`, where their shapes are given; there may be more chunks than are in use."""

    centres: Float32
    lengths: npt.NDArray[np.uint16]
    high: npt.NDArray[np.uint8]
    low: npt.NDArray[np.uint8]
    signs: npt.NDArray[np.uint8]
    longest: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        self.native = _native.Flat(self.centres, self.lengths, self.high, self.low, self.signs, self.longest)

    @classmethod
    def empty(cls, kv_heads: int, head_dim: int, chunks: int) -> "Codes":
        """Codes with room for `chunks` chunks, all zero."""
        plane = CHUNK * head_dim // 2
        return cls(
            np.zeros((chunks, kv_heads, head_dim + 1), np.float32),
            np.zeros((chunks, kv_heads, LENGTHS, CHUNK), np.uint16),
            np.zeros((chunks, kv_heads, plane), np.uint8),
            np.zeros((chunks, kv_heads, plane), np.uint8),
            np.zeros((chunks, kv_heads, CHUNK * (head_dim // 8 + 4)), np.uint8),
            np.zeros((chunks, kv_heads), np.int32),
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
        bigger = Codes.empty(kv_heads, width - 1, max(needed, have + have // 2))
        for name, array in self.arrays(None).items():
            getattr(bigger, name)[:have] = array
        return bigger

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays, with their room to grow."""
        return sum(array.nbytes for array in self.arrays(None).values())

    def used_nbytes(self, tokens: int) -> int:
        """The bytes of the chunks that hold `tokens` tokens."""
        return sum(array.nbytes for array in self.arrays(chunks_of(tokens)).values())


def chunks_of(tokens: int) -> int:
    """The number of chunks that hold `tokens` tokens."""
    return -(-tokens // CHUNK)
