"""What the answers to queries of an adversary are to be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.adversaries import Adversary
from kvdb.types import Array

Float64 = npt.NDArray[np.float64]

ROWS = 64
"""Queries of a head that are answered in one product."""


class Oracle:
    """Attention in float64 over an adversary's keys and values, and over tokens that a session added."""

    def __init__(self, adversary: Adversary, scale: float) -> None:
        self._scale = scale
        k, v = (array.astype(np.float64) for array in (adversary.k, adversary.v))
        pools = {False: adversary.before, True: adversary.after}
        self._stored = {late: self._pool(pool, k, v) for late, pool in pools.items() if pool is not None}
        self._nothing = self._own = np.zeros((2, len(k), 0, k.shape[2]))

    def forget(self) -> None:
        """Forget the tokens that a session added."""
        self._own = self._nothing

    def append(self, k: Array, v: Array) -> None:
        """Tokens of the session, `[kv_heads, n, head_dim]`."""
        self._own = np.concatenate([self._own, np.stack([k, v]).astype(np.float64)], axis=2)

    def answer(self, q: Array, number: int, *, late: bool) -> Float64:
        """Attention of q, `[q_heads, 1, head_dim]`, a query of the pool before or after the change of habits."""
        stored_out, stored_lse = self._stored[late]
        out, lse = stored_out[:, :, number], stored_lse[:, :, number]
        own_out, own_lse = _state(q.astype(np.float64).reshape(out.shape), *self._own, self._scale)
        share = 1 / (1 + np.exp(own_lse - lse))[..., None]
        return np.asarray((share * out + (1 - share) * own_out).reshape(q.shape), np.float64)

    def _pool(self, pool: Array, k: Float64, v: Float64) -> tuple[Float64, Float64]:
        """out `[kv_heads, group, m, head_dim]` and log-sum-exp `[kv_heads, group, m]` of all queries of a pool."""
        q = pool.astype(np.float64).reshape(len(k), -1, pool.shape[2])
        states = [_state(q[:, at : at + ROWS], k, v, self._scale) for at in range(0, q.shape[1], ROWS)]
        out, lse = (np.concatenate(parts, axis=1) for parts in zip(*states, strict=True))
        shape = len(k), len(pool) // len(k), pool.shape[1]
        return out.reshape(*shape, -1), lse.reshape(shape)


def _state(q: Float64, k: Float64, v: Float64, scale: float) -> tuple[Float64, Float64]:
    """Attention of q, `[kv_heads, rows, head_dim]`, and its log-sum-exp, `[kv_heads, rows]`."""
    logits = q @ k.transpose(0, 2, 1) * scale
    largest = logits.max(axis=2, keepdims=True)
    weights = np.exp(logits - largest)
    sums = weights.sum(axis=2, keepdims=True)
    return weights / sums @ v, (largest + np.log(sums))[..., 0]
