"""Blocks in plain memory, for tests of the native module."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from kvdb import _native

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def bits(array: np.ndarray) -> np.ndarray:
    """As the native module takes it: 16-bit types as uint16."""
    return array if array.dtype == np.float32 else array.view(np.uint16)


def draw_run(data, block_sizes: list[int]) -> tuple[str, int, int, int, int, list[int]]:
    """Draws a run of blocks for a property: dtype, kv_heads, query heads of each, head_dim, block_size, tokens of each block."""
    dtype = data.draw(st.sampled_from(list(DTYPES)), "dtype")
    kv_heads, group = data.draw(st.integers(1, 3), "kv_heads"), data.draw(st.integers(1, 9), "group")
    head_dim = 8 * data.draw(st.integers(1, 32), "head_dim / 8")
    block_size = data.draw(st.sampled_from(block_sizes), "block_size")
    counts = data.draw(st.lists(st.integers(0, block_size), max_size=12), "counts")
    return dtype, kv_heads, group, head_dim, block_size, counts


class Blocks:
    """`count` blocks in shuffled order, filled with NaN so that a read of what was never written shows. values: value_dim and
    whether values lie in keys, where they are not as keys are."""

    def __init__(self, dtype: str, kv_heads: int, head_dim: int, block_size: int, count: int, *values: int | bool) -> None:
        self.dtype = DTYPES[dtype]
        self.geometry = _native.Geometry(getattr(_native.Dtype, dtype), kv_heads, head_dim, block_size, *values)
        self.memory = np.full(count * self.geometry.block_bytes, 0xFF, np.uint8)
        order = np.random.default_rng(count).permutation(count).astype(np.uint64)
        self.table = np.uint64(self.memory.ctypes.data) + order * np.uint64(self.geometry.block_bytes)

    def write(self, start: int, k: np.ndarray, v: np.ndarray | None) -> tuple[str, int, int] | None:
        return _native.append(self.geometry, self.table, start, bits(k), None if v is None else bits(v))

    def read(self, start: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        shape = self.geometry.kv_heads, n
        k = np.zeros((*shape, self.geometry.head_dim), self.dtype)
        v = np.zeros((*shape, self.geometry.value_dim), self.dtype)
        _native.gather(self.geometry, self.table, start, n, bits(k), bits(v))
        return k, v


def random(shape: tuple[int, ...], dtype: str, seed: int, magnitude: float = 1.0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (magnitude * values).astype(DTYPES[dtype])
