"""The layout of one block in memory, and copies of tokens into and out of runs of blocks."""

import atexit
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

import kvdb._native as _native
from indexes.base import Int64
from kvdb.types import DTYPES, Addresses, Array, ModelSpec


class NonFinite(NamedTuple):
    """The first key or value that is NaN or infinite."""

    what: str
    head: int
    token: int


@dataclass(frozen=True)
class BlockLayout:
    """A block is `[2, kv_heads, block_size, head_dim]`: the K plane, then the V plane, so that one head's keys lie together."""

    dtype: str
    kv_heads: int
    head_dim: int
    block_size: int

    @classmethod
    def of(cls, spec: ModelSpec, block_size: int) -> "BlockLayout":
        return cls(spec.dtype, spec.kv_heads, spec.head_dim, block_size)

    @cached_property
    def nbytes(self) -> int:
        return 2 * self.kv_heads * self.block_size * self.head_dim * DTYPES[self.dtype].itemsize

    @cached_property
    def token_nbytes(self) -> int:
        """The bytes of one token's keys and values."""
        return self.nbytes // self.block_size

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @property
    def native(self) -> _native.Geometry:
        return _geometry(self.dtype, self.kv_heads, self.head_dim, self.block_size)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def write(self, addresses: Addresses, start: int, k: Array, v: Array) -> NonFinite | None:
        """Write k and v, `[kv_heads, n, head_dim]`, at tokens [start, start + n) of a run. Returns the first value that is not
        finite, if any."""
        bad = _native.append(self.native, addresses, start, bits(k), bits(v))
        return None if bad is None else NonFinite(*bad)

    def finite(self, array: Array, logs: Array | None = None) -> bool:
        """Whether an array `[heads, n, head_dim]` of any number of heads holds neither NaN nor infinity. logs: float32
        `[heads, n]`, contiguous, which are looked at as well."""
        return _native.finite(self.native, bits(array), logs)

    def read(self, addresses: Addresses, start: int, n: int) -> tuple[Array, Array]:
        """k and v, `[kv_heads, n, head_dim]`, of tokens [start, start + n) of a run."""
        k, v = (np.empty((self.kv_heads, n, self.head_dim), DTYPES[self.dtype]) for _ in range(2))
        self.read_into(addresses, start, k, v)
        return k, v

    def read_into(self, addresses: Addresses, start: int, k: Array, v: Array) -> None:
        """Like `read`, into arrays of the caller's in the layout's dtype, whose last dimension is contiguous."""
        _native.gather(self.native, addresses, start, k.shape[1], bits(k), bits(v))

    def read_at(self, addresses: Addresses, tokens: Int64) -> tuple[Array, Array]:
        """k and v, `[kv_heads, n, head_dim]`, of n tokens of a run, int64, in any order."""
        k, v = (np.empty((self.kv_heads, len(tokens), self.head_dim), DTYPES[self.dtype]) for _ in range(2))
        _native.gather_at(self.native, addresses, tokens, bits(k), bits(v))
        return k, v

    def copy(self, source: Addresses, source_start: int, target: Addresses, target_start: int, n: int) -> None:
        """Copy n tokens between two runs, at any alignment."""
        _native.copy(self.native, source, source_start, target, target_start, n)


def bits(array: Array) -> Array:
    """The array in the form that native code takes: 16-bit floats as uint16, float32 as it is, the last dimension contiguous.

    It is copied only where that dimension is not.
    """
    if array.strides[-1] != array.itemsize and array.size:
        array = np.ascontiguousarray(array)
    return array if array.itemsize == 4 else array.view(np.uint16)


@cache
def _geometry(dtype: str, kv_heads: int, head_dim: int, block_size: int) -> _native.Geometry:
    return _native.Geometry(_native.Dtype[dtype], kv_heads, head_dim, block_size)


# Here and not in layouts, because libraries such as torch keep objects for ever that a layout may hang on, and native objects
# that outlive the interpreter are reported as leaks.
atexit.register(_geometry.cache_clear)
