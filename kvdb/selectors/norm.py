"""The length of a key: those that much attention goes to are short.

Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", 2024, arXiv 2406.11430.
"""

import numpy as np

from kvdb.types import Array, Float32


class Norm:
    """The score of a token is minus the length of its key; RoPE does not change that."""

    name = "norm"

    def scores(self, layer: int, k: Array, v: Array) -> Float32:  # noqa: ARG002  # the same of all layers, whatever the values
        rows = k.astype(np.float32)
        squares: Float32 = np.einsum("htd,htd->ht", rows, rows)
        return -np.sqrt(squares)
