"""Rotates queries for keys that were moved: the query is rotated back, and the keys stay as they are.

RoPE is a rotation R, so q . R(shift) k = R(-shift) q . k (RoFormer, arXiv 2104.09864, equation 16).
"""

import numpy as np
import numpy.typing as npt

from indexes.base import Float32


def inverse_frequencies(theta: float, rotary_dims: int) -> npt.NDArray[np.float64]:
    """The radians per position of each rotated pair, `[rotary_dims / 2]`, for a RoPE without scaling."""
    return theta ** (-np.arange(0, rotary_dims, 2) / rotary_dims)


def rotate(x: Float32, positions: int, frequencies: npt.NDArray[np.float64], layout: str = "half") -> Float32:
    """A copy of x, `[..., head_dim]`, moved by `positions`, backwards when negative; float32.

    frequencies: radians per position, one for each pair of the first 2 * len(frequencies) dimensions; the other dimensions stay
    as they are. layout: "half" pairs dimension i with i + len(frequencies), "interleaved" pairs 2i with 2i + 1. Angles are
    computed in float64.
    """
    pairs = len(frequencies)
    cos, sin = np.cos(positions * frequencies), np.sin(positions * frequencies)
    first = slice(0, pairs) if layout == "half" else slice(0, 2 * pairs, 2)
    second = slice(pairs, 2 * pairs) if layout == "half" else slice(1, 2 * pairs, 2)
    moved = np.array(x, np.float32)
    moved[..., first] = x[..., first] * cos - x[..., second] * sin
    moved[..., second] = x[..., second] * cos + x[..., first] * sin
    return moved
