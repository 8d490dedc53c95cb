"""The keys and values of one layer: blocks at addresses, as they were stored."""

import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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

    table: uint64 `[blocks]`, the addresses of blocks `[2, kv_heads, block_size, head_dim]`: keys, then values; or of quantized
    blocks (`native/block_format.h`), whose format stands in the lowest bits of their addresses, the same in all. owner: an object
    that keeps that memory alive, where the caller does not.
    """

    dtype: str
    kv_heads: int
    head_dim: int
    block_size: int
    table: npt.NDArray[np.uint64]
    tokens: int
    owner: object = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, k: Array, v: Array | None = None, block_size: int = 64) -> "Blocks":
        """Blocks that hold a copy of k and v, `[kv_heads, n, head_dim]` in one of DTYPES; without v the values are zero."""
        kv_heads, n, head_dim = k.shape
        count = -(-n // block_size)
        memory = np.zeros((count, 2, kv_heads, block_size, head_dim), k.dtype)
        for plane, array in enumerate((k, v)):
            if array is not None:
                for b in range(count):
                    rows = array[:, b * block_size : (b + 1) * block_size]
                    memory[b, plane, :, : rows.shape[1]] = rows
        table = memory.ctypes.data + memory.strides[0] * np.arange(count, dtype=np.uint64)
        return cls(k.dtype.name, kv_heads, head_dim, block_size, table.astype(np.uint64), n, memory)

    @cached_property
    def native(self) -> _native.Blocks:
        dtype = getattr(_native.Dtype, self.dtype)
        return _native.Blocks(dtype, self.kv_heads, self.head_dim, self.block_size, self.table, self.tokens)

    @cached_property
    def code_bits(self) -> tuple[int, int] | None:
        """The bits of a number of a key, and of a value; None where they lie in their dtype."""
        return CODE_BITS.get(int(self.table[0]) & FORMAT_MASK) if len(self.table) else None

    @property
    def token_nbytes(self) -> int:
        """Bytes of the keys and values of one token of one KV head."""
        if self.code_bits is not None:
            return sum(self.head_dim * bits // 8 + SCALE_BYTES for bits in self.code_bits)
        return int(2 * self.head_dim * DTYPES[self.dtype].itemsize)

    def identity(self) -> dict[str, object]:
        """The values by which an index file recognises its keys, as JSON holds them: the shape, and the CRC-32 of some keys,
        spread evenly."""
        crc = 0
        spread = np.linspace(0, max(self.tokens - 1, 0), min(self.tokens, SAMPLED_TOKENS)).astype(np.int64)
        for token in spread.tolist():
            for head in range(self.kv_heads):
                crc = zlib.crc32(self.keys(head, token, token + 1).tobytes(), crc)
        shape = {name: getattr(self, name) for name in ("dtype", "kv_heads", "head_dim", "tokens")}
        return {**shape, "keys": crc}

    def check_extends(self, before: "Blocks") -> None:
        """Raises ValueError unless these blocks can hold the tokens of `before` with more tokens behind them."""
        for name in ("dtype", "kv_heads", "head_dim"):
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
        """A copy of some values, float32 `[end - begin, head_dim]`."""
        out = np.empty(((self.tokens if end is None else end) - begin, self.head_dim), np.float32)
        _native.read_values(self.native, kv_head, begin, out)
        return out
