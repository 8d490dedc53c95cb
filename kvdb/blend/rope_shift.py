"""Shifts of views that stand at other positions than they were computed at: queries are turned back, and stored keys stay as they
are.

RoPE is a rotation R, so q . R(shift) k = R(-shift) q . k (RoFormer, arXiv 2104.09864, equation 16).
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvdb._native as _native
from kvdb.blend.rope import angles, inverse_frequencies
from kvdb.errors import Unsupported
from kvdb.types import Float32, ModelSpec


@dataclass(frozen=True)
class Turn:
    """The rotation of one view. cos, sin: float32 `[pairs]`. interleaved: whether pairs are neighbours."""

    cos: Float32
    sin: Float32
    interleaved: bool

    def back(self, q: Float32) -> Float32:
        """The queries q, `[q_heads, n, head_dim]`, turned back for the keys of the view as they are stored."""
        out = np.empty(q.shape, np.float32)
        _native.rotate(_native.Geometry(_native.Dtype.float32, 1, q.shape[2]), q, self.cos, self.sin, self.interleaved, out)
        return out


def check_movable(spec: ModelSpec) -> None:
    """Raises Unsupported where keys of this model cannot be moved to other positions."""
    if not spec.uniform:
        raise Unsupported(
            f"the layers of {spec.name} differ ({spec.shapes}), so a chunk of it cannot stand anywhere: what a window or a state "
            "holds depends on the tokens before it; store it as a context, which is found where it begins a prompt"
        )
    inverse_frequencies(spec.rope, spec.head_dim)


class RopeShifts:
    """The shift of each view of a session, and the rotation of vectors by it.

    of_view: int32 `[views]`, the row of `cos` and `sin` for each view, -1 for a view that was not moved. cos, sin: float32
    `[shifts, pairs]`, for the angles by which keys would be turned. interleaved: whether pairs are neighbours, as in
    `Rope.layout`.
    """

    def __init__(self, spec: ModelSpec, shifts: Sequence[int]) -> None:
        """Raises Unsupported where keys of this model cannot be moved."""
        distinct = sorted({shift for shift in shifts if shift})
        self.of_view = np.array([distinct.index(shift) if shift else -1 for shift in shifts], np.int32)
        self.cos = self.sin = np.zeros((0, 1), np.float32)
        self.interleaved = spec.rope is not None and spec.rope.layout == "interleaved"
        if distinct:
            frequencies = inverse_frequencies(spec.rope, spec.head_dim)
            pairs = [angles(frequencies, shift) for shift in distinct]
            self.cos, self.sin = (np.ascontiguousarray(np.stack(part), np.float32) for part in zip(*pairs, strict=True))

    def of_first(self, views: int) -> "RopeShifts":
        """The shifts of the first `views` views."""
        twin = copy(self)
        twin.of_view = self.of_view[:views]
        return twin

    def angles_of(self, view: int) -> tuple[Float32, Float32] | None:
        """The cos and sin of one view, `[pairs]` each; None if it was not moved."""
        row = int(self.of_view[view])
        return None if row < 0 else (self.cos[row], self.sin[row])

    def turn_of(self, view: int) -> Turn | None:
        """The rotation of one view; None if it was not moved."""
        angles = self.angles_of(view)
        return None if angles is None else Turn(*angles, self.interleaved)


def hidden_words(begin: int, visible: int, block_size: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Which of a view's tokens are overlaid: uint64 `[blocks, words]`, bit t % 64 of word t // 64 of a block for its token t.

    begin: the view's first position; positions: those that are overlaid, in any order.
    """
    blocks, words = -(-visible // block_size), -(-block_size // 64)
    flags = np.zeros((blocks, words * 64), np.uint8)
    own = positions[(positions >= begin) & (positions < begin + visible)] - begin
    flags[own // block_size, own % block_size] = 1
    return np.packbits(flags, axis=1, bitorder="little").view(np.uint64)
