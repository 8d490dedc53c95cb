"""The keys and values of one layer: blocks at addresses, as they were stored."""

import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

import indexes._native as _native

SAMPLED_TOKENS = 64
"""The number of tokens of each KV head whose keys go into the identity of a layer."""
CODE_BITS = {1: (8, 8), 2: (8, 4), 3: (4, 4)}
"""The bits of a number of a key and of a value, by the format that stands in the FORMAT_MASK bits of a block's address."""
FORMAT_MASK = 7
SCALE_BYTES = 2
"""What a quantized key, or value, has beside its codes."""
Array = npt.NDArray[Any]
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Blocks:
    """The first `tokens` tokens of one layer.

    table: uint64 `[blocks]`, the addresses of blocks of keys, `[kv_heads, block_size, head_dim]`, and then values, `[kv_heads,
    block_size, value_dim]`; or of quantized blocks (`native/block_format.h`), whose format stands in the lowest bits of their
    addresses, the same in all. owner: an object that keeps that memory alive, where the caller does not. value_dim: head_dim
    where it is not given; with 0, tokens have no values. values_in_keys: there are keys alone, and a value is the first value_dim
    numbers of its key.
    """

    dtype: str
    kv_heads: int
    head_dim: int
    block_size: int
    table: npt.NDArray[np.uint64]
    tokens: int
    owner: object = field(default=None, repr=False, compare=False)
    value_dim: int = None  # type: ignore[assignment]  # never after __post_init__
    values_in_keys: bool = False

    def __post_init__(self) -> None:
        if cast("int | None", self.value_dim) is None:
            object.__setattr__(self, "value_dim", self.head_dim)

    @classmethod
    def of(cls, k: Array, v: Array | None = None, block_size: int = 64, *, value_dim: int | None = None) -> "Blocks":
        """Blocks that hold a copy of k, `[kv_heads, n, head_dim]`, and v, `[kv_heads, n, value_dim]`, in one of DTYPES; without v
        the values are zero. value_dim: of values that are the first numbers of their keys, or None for values of their own."""
        kv_heads, n, head_dim = k.shape
        count = -(-n // block_size)
        in_keys = value_dim is not None
        own_dim = 0 if in_keys else head_dim if v is None else v.shape[2]
        memory = np.zeros((count, kv_heads * block_size * (head_dim + own_dim)), k.dtype)
        planes = np.split(memory, [kv_heads * block_size * head_dim], axis=1)
        for plane, array in zip(planes, (k, v), strict=True):
            if array is not None and plane.size:
                for b in range(count):
                    rows = array[:, b * block_size : (b + 1) * block_size]
                    plane[b].reshape(kv_heads, block_size, -1)[:, : rows.shape[1]] = rows
        table = (memory.ctypes.data + memory.strides[0] * np.arange(count, dtype=np.uint64)).astype(np.uint64)
        values = own_dim if value_dim is None else value_dim
        return cls(k.dtype.name, kv_heads, head_dim, block_size, table, n, memory, values, in_keys)

    @cached_property
    def native(self) -> _native.Blocks:
        dtype = getattr(_native.Dtype, self.dtype)
        return _native.Blocks(
            dtype, self.kv_heads, self.head_dim, self.block_size, self.table, self.tokens, self.value_dim, self.values_in_keys
        )

    @property
    def is_symmetric(self) -> bool:
        """Whether values are as long as keys, and apart from them."""
        return self.value_dim == self.head_dim and not self.values_in_keys

    @cached_property
    def code_bits(self) -> tuple[int, int] | None:
        """The bits of a number of a key, and of a value; None where they lie in their dtype."""
        return CODE_BITS.get(int(self.table[0]) & FORMAT_MASK) if len(self.table) else None

    @property
    def token_nbytes(self) -> int:
        """Bytes of what is stored of one token of one KV head."""
        if self.code_bits is not None:
            return sum(self.head_dim * bits // 8 + SCALE_BYTES for bits in self.code_bits)
        return int((self.head_dim + (0 if self.values_in_keys else self.value_dim)) * DTYPES[self.dtype].itemsize)

    @property
    def key_nbytes(self) -> float:
        """Bytes of one token's key of one KV head; the mean of a key and a value where they are quantized."""
        return self.token_nbytes / 2 if self.code_bits is not None else float(self.head_dim * DTYPES[self.dtype].itemsize)

    def identity(self) -> dict[str, object]:
        """The values by which an index file recognises its keys, as JSON holds them: the shape, and the CRC-32 of some keys,
        spread evenly."""
        crc = 0
        spread = np.linspace(0, max(self.tokens - 1, 0), min(self.tokens, SAMPLED_TOKENS)).astype(np.int64)
        for token in spread.tolist():
            for head in range(self.kv_heads):
                crc = zlib.crc32(self.keys(head, token, token + 1).tobytes(), crc)
        names = ("dtype", "kv_heads", "head_dim", "tokens", *(() if self.is_symmetric else ("value_dim", "values_in_keys")))
        return {**{name: getattr(self, name) for name in names}, "keys": crc}

    def check_extends(self, before: "Blocks") -> None:
        """Raises ValueError unless these blocks can hold the tokens of `before` with more tokens behind them."""
        for name in ("dtype", "kv_heads", "head_dim", "value_dim", "values_in_keys"):
            if getattr(self, name) != getattr(before, name):
                raise ValueError(
                    f"the new blocks have {name} {getattr(self, name)}; expected {getattr(before, name)}, as those indexed before"
                )
        if self.tokens < before.tokens:
            raise ValueError(f"the new blocks hold {self.tokens} tokens; expected the {before.tokens} indexed before, and more")

    def keys(self, kv_head: int, begin: int = 0, end: int | None = None) -> npt.NDArray[np.float32]:
        """A copy of some keys, float32 `[end - begin, head_dim]`."""
        out = np.empty(((self.tokens if end is None else end) - begin, self.head_dim), np.float32)
        _native.read_keys(self.native, kv_head, begin, out)
        return out

    def stored_keys(self, kv_head: int, begin: int = 0, end: int | None = None) -> Array:
        """A copy of some keys in the dtype of the blocks, `[end - begin, head_dim]`."""
        if self.code_bits is not None:
            return self.keys(kv_head, begin, end).astype(DTYPES[self.dtype])
        out = np.empty(((self.tokens if end is None else end) - begin, self.head_dim), DTYPES[self.dtype])
        _native.copy_keys(self.native, kv_head, begin, out.view(np.uint8))
        return out

    def values(self, kv_head: int, begin: int = 0, end: int | None = None) -> npt.NDArray[np.float32]:
        """A copy of some values, float32 `[end - begin, value_dim]`."""
        out = np.empty(((self.tokens if end is None else end) - begin, self.value_dim), np.float32)
        _native.read_values(self.native, kv_head, begin, out)
        return out
