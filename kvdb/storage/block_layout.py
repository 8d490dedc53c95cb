"""The layout of one block in memory, and copies of tokens into and out of runs of blocks."""

import atexit
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

import kvdb._native as _native
import kvdb.codecs.registry as codecs
from indexes.base import Int64
from kvdb.codecs.base import Codec, Rounding
from kvdb.errors import InvalidArgument
from kvdb.types import DTYPES, Addresses, Array, LayerShape, bits

FORMAT_MASK = 7
"""The bits of a block's address where the number of its codec is."""


class NonFinite(NamedTuple):
    """The first key or value that is NaN or infinite."""

    what: str
    head: int
    token: int


@dataclass(frozen=True)
class BlockLayout:
    """A block is the K plane, `[kv_heads, block_size, head_dim]`, then the V plane, `[kv_heads, block_size, value_dim]`, so that
    one head's keys lie together.

    dtype: that of the keys and values that come in and go out. format: the name of the codec, "" for blocks as above. Others are
    written once, by `encode`, and read as what is left. value_dim: head_dim where it is not given; with 0, tokens have no values.
    values_in_keys: there is no V plane, and a value is the first value_dim numbers of its key. Raises InvalidArgument where a
    codec cannot hold such keys and values.
    """

    dtype: str
    kv_heads: int
    head_dim: int
    block_size: int
    format: str = ""
    value_dim: int = None  # type: ignore[assignment]  # never after the first line of __post_init__
    values_in_keys: bool = False

    def __post_init__(self) -> None:
        if cast("int | None", self.value_dim) is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        if self.format and not self.is_symmetric:
            where = " in the keys" if self.values_in_keys else ""
            raise InvalidArgument(
                f"the codec {self.format!r} cannot hold keys of {self.head_dim} numbers with values of {self.value_dim}{where}; "
                'expected values of their own, as long as keys, or the codec ""'
            )

    @property
    def is_symmetric(self) -> bool:
        """Whether values are as long as keys, and apart from them."""
        return self.value_dim == self.head_dim and not self.values_in_keys

    @property
    def has_own_values(self) -> bool:
        """Whether a block has a V plane."""
        return self.value_dim > 0 and not self.values_in_keys

    @classmethod
    def of(cls, shape: LayerShape, block_size: int) -> "BlockLayout":
        return cls(shape.dtype, shape.kv_heads, shape.head_dim, block_size, "", shape.value_dim, shape.values_in_keys)

    @cached_property
    def codec(self) -> Codec:
        return codecs.CODECS[self.format]

    @cached_property
    def nbytes(self) -> int:
        return self.codec.nbytes(self.native)

    @cached_property
    def token_nbytes(self) -> int:
        """The bytes of one token's keys and values."""
        return self.nbytes // self.block_size

    @cached_property
    def value_nbytes(self) -> int:
        """The bytes of one token's values."""
        return self.codec.value_nbytes(self.native) // self.block_size

    def nbytes_of(self, addresses: Addresses, counts: npt.NDArray[np.int32]) -> int:
        """The bytes of so many tokens of each block, whose format its address tells (`tag`)."""
        formats = addresses & np.uint64(FORMAT_MASK)
        if not formats.any():
            return int(counts.sum()) * self.token_nbytes
        tokens = np.bincount(formats.astype(np.int64), weights=counts)
        return sum(int(n) * self.of_block(number).nbytes // self.block_size for number, n in enumerate(tokens) if n)

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @property
    def native(self) -> _native.Geometry:
        return _geometry(self.dtype, self.kv_heads, self.head_dim, self.block_size, self.value_dim, self.values_in_keys)

    @cached_property
    def tag(self) -> np.uint64:
        """What is added to the address of a block for the kernels of attention, so that they know how it lies."""
        return np.uint64(self.codec.number)

    def in_format(self, format: str) -> "BlockLayout":  # noqa: A002  # the field's name
        """The layout of the same tokens in that format; as it is where only plain blocks can hold them."""
        return replace(self, format=format) if self.is_symmetric else self

    def of_block(self, address: int) -> "BlockLayout":
        """The layout of a block of the same tokens that lies as its address tells (`tag`)."""
        return self.in_format(codecs.of_number(int(address) & FORMAT_MASK).name)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def write(self, addresses: Addresses, start: int, k: Array, v: Array | None) -> NonFinite | None:
        """Write k, `[kv_heads, n, head_dim]`, and v, `[kv_heads, n, value_dim]`, at tokens [start, start + n) of a run. Returns
        the first value that is not finite, if any. v: nobody looks at it where there is no V plane."""
        values = None if v is None or not self.has_own_values else bits(v)
        bad = _native.append(self.native, addresses, start, bits(k), values)
        return None if bad is None else NonFinite(*bad)

    def copy_first(self, source: int, target: int, n: int) -> None:
        """Copy the first n tokens of one block at these addresses."""
        self.codec.copy_first(self.native, source, n, target)

    def finite(self, array: Array, logs: Array | None = None) -> bool:
        """Whether an array `[heads, n, head_dim]` or `[heads, n, value_dim]` of any number of heads holds neither NaN nor
        infinity. logs: float32 `[heads, n]`, contiguous, which are looked at as well."""
        return _native.finite(self.native, bits(array), logs)

    def zeros(self, n: int) -> tuple[Array, Array]:
        """k and v of n tokens, all zeros."""
        k, v = self._arrays(n)
        k[:] = v[:] = 0
        return k, v

    def read(self, addresses: Addresses, start: int, n: int) -> tuple[Array, Array]:
        """k, `[kv_heads, n, head_dim]`, and v, `[kv_heads, n, value_dim]`, of tokens [start, start + n) of a run. v is a view of
        k where values lie in keys."""
        k, v = self._arrays(n)
        self.read_into(addresses, start, k, v if self.has_own_values else None)
        return k, v

    def read_into(self, addresses: Addresses, start: int, k: Array, v: Array | None) -> None:
        """Like `read`, into arrays of the caller's in the layout's dtype, whose last dimension is contiguous. v: None for keys
        alone, where there is no V plane."""
        if v is None or not self.has_own_values:
            _native.gather(self.native, addresses, start, k.shape[1], bits(k), None)
        else:
            self.codec.decode(self.native, addresses, start, k, v)

    def _arrays(self, n: int) -> tuple[Array, Array]:
        """Room for keys and values; these are a view where they lie in keys."""
        k = np.empty((self.kv_heads, n, self.head_dim), DTYPES[self.dtype])
        v = k[..., : self.value_dim] if self.values_in_keys else np.empty((self.kv_heads, n, self.value_dim), k.dtype)
        return k, v

    def encode(self, source: Addresses, n: int, target: Addresses) -> Rounding:
        """Write the first n tokens of a run of plain blocks into blocks of this layout, one for each."""
        return self.codec.encode(self.native, source, n, target)

    def read_at(self, addresses: Addresses, tokens: Int64) -> tuple[Array, Array]:
        """k and v as `read` gives them, of n tokens of a run, int64, in any order."""
        k, v = self._arrays(len(tokens))
        _native.gather_at(self.native, addresses, tokens, bits(k), bits(v) if self.has_own_values else None)
        return k, v

    def copy(self, source: Addresses, source_start: int, target: Addresses, target_start: int, n: int) -> None:
        """Copy n tokens between two runs, at any alignment."""
        _native.copy(self.native, source, source_start, target, target_start, n)


@cache
def _geometry(  # those of a layout
    dtype: str, kv_heads: int, head_dim: int, block_size: int, value_dim: int, values_in_keys: bool
) -> _native.Geometry:
    return _native.Geometry(_native.Dtype[dtype], kv_heads, head_dim, block_size, value_dim, values_in_keys)


# Here and not in layouts, because libraries such as torch keep objects for ever that a layout may hang on, and native objects
# that outlive the interpreter are reported as leaks.
atexit.register(_geometry.cache_clear)
