"""The layout of one block in memory, and copies of tokens into and out of runs of blocks."""

import atexit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvdb._native as _native
from indexes.base import Int64
from kvdb.types import DTYPES, FORMATS, Addresses, Array, ModelSpec

FORMAT_MASK = 7
"""The bits of a block's address where its format is: the number of its name in FORMATS."""


class NonFinite(NamedTuple):
    """The first key or value that is NaN or infinite."""

    what: str
    head: int
    token: int


class Rounding(NamedTuple):
    """Squared lengths: of what quantizing changed in the keys, of the keys, and the same of the values."""

    keys_changed: float
    keys: float
    values_changed: float
    values: float

    @classmethod
    def of_all(cls, roundings: Sequence["Rounding"]) -> "Rounding":
        """That of several layers or segments together; zeros for none."""
        return cls(*(sum(lengths) for lengths in zip(*roundings, strict=True))) if roundings else cls(0.0, 0.0, 0.0, 0.0)

    @property
    def key_error(self) -> float:
        """The relative error of the keys."""
        return sqrt(self.keys_changed / self.keys) if self.keys else 0.0

    @property
    def value_error(self) -> float:
        """The relative error of the values."""
        return sqrt(self.values_changed / self.values) if self.values else 0.0


@dataclass(frozen=True)
class BlockLayout:
    """A block is `[2, kv_heads, block_size, head_dim]`: the K plane, then the V plane, so that one head's keys lie together.

    dtype: that of the keys and values that come in and go out. format: "" for blocks that hold them as they are, or one of
    `kvdb.types.FORMATS`: then they are written once, by `quantize`, and read as what rounding left.
    """

    dtype: str
    kv_heads: int
    head_dim: int
    block_size: int
    format: str = ""

    @classmethod
    def of(cls, spec: ModelSpec, block_size: int) -> "BlockLayout":
        return cls(spec.dtype, spec.kv_heads, spec.head_dim, block_size)

    @cached_property
    def nbytes(self) -> int:
        if self.format:
            return _native.block_bytes(self.native, self.native_format)
        return 2 * self.kv_heads * self.block_size * self.head_dim * DTYPES[self.dtype].itemsize

    @cached_property
    def token_nbytes(self) -> int:
        """The bytes of one token's keys and values."""
        return self.nbytes // self.block_size

    @cached_property
    def value_nbytes(self) -> int:
        """The bytes of one token's values. Those of int8-int4 lie as in int4; elsewhere keys take as much as values."""
        return (self.quantized("int4") if self.format == "int8-int4" else self).token_nbytes // 2

    def nbytes_of(self, addresses: Addresses, counts: npt.NDArray[np.int32]) -> int:
        """The bytes of so many tokens of each block, whose format its address tells (`tag`)."""
        formats = addresses & np.uint64(FORMAT_MASK)
        if not formats.any():
            return int(counts.sum()) * self.token_nbytes
        tokens = np.bincount(formats.astype(np.int64), weights=counts, minlength=len(FORMATS))
        layouts = [self.quantized(name) for name in FORMATS]
        return sum(int(n) * layout.nbytes // self.block_size for n, layout in zip(tokens, layouts, strict=True) if n)

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @property
    def native(self) -> _native.Geometry:
        return _geometry(self.dtype, self.kv_heads, self.head_dim, self.block_size)

    @property
    def native_format(self) -> _native.BlockFormat:
        return _native.BlockFormat[self.format.replace("-", "_") or "raw"]

    @property
    def tag(self) -> np.uint64:
        """What is added to the address of a block for the kernels of attention, so that they know its format."""
        return np.uint64(self.native_format.value)

    def quantized(self, format: str) -> "BlockLayout":  # noqa: A002  # the field's name
        """The layout of the same tokens in that format."""
        return replace(self, format=format)

    def of_block(self, address: int) -> "BlockLayout":
        """The layout of a block of the same tokens, whose format its address tells (`tag`)."""
        return self.quantized(FORMATS[int(address) & FORMAT_MASK])

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def write(self, addresses: Addresses, start: int, k: Array, v: Array) -> NonFinite | None:
        """Write k and v, `[kv_heads, n, head_dim]`, at tokens [start, start + n) of a run. Returns the first value that is not
        finite, if any."""
        bad = _native.append(self.native, addresses, start, bits(k), bits(v))
        return None if bad is None else NonFinite(*bad)

    def copy_first(self, source: int, target: int, n: int) -> None:
        """Copy one block at these addresses, with zeros behind its first n tokens where it is quantized, and else only these."""
        if self.format:
            _native.cut(self.native, self.native_format, source, n, target)
        else:
            self.copy(np.array([source], np.uint64), 0, np.array([target], np.uint64), 0, n)

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
        if self.format:
            _native.dequantize(self.native, self.native_format, addresses, start, k.shape[1], bits(k), bits(v))
        else:
            _native.gather(self.native, addresses, start, k.shape[1], bits(k), bits(v))

    def quantize(self, source: Addresses, n: int, target: Addresses) -> Rounding:
        """Write the first n tokens of a run of plain blocks into blocks of this layout, one for each."""
        return Rounding(*_native.quantize(self.native, self.native_format, source, n, target))

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
