"""Runs of blocks of which some were moved and some tokens are hidden, and attention over them in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvdb import _native
from tests.kvdb.native.blocks import DTYPES, Blocks, bits, random


def angles(views: int, pairs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [views, pairs], of ways of up to some hundred thousand positions, either way."""
    rng = np.random.default_rng(seed)
    frequencies = 10000.0 ** (-np.arange(pairs) / max(pairs, 1))
    moved = rng.integers(-300_000, 300_000, (views, 1)) * frequencies
    return np.cos(moved).astype(np.float32), np.sin(moved).astype(np.float32)


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """x [..., head_dim] rotated forward, float64. cos, sin: [..., pairs]."""
    x, pairs = np.array(x, np.float64), cos.shape[-1]
    first, second = (np.s_[..., : 2 * pairs : 2], np.s_[..., 1 : 2 * pairs : 2])
    if not interleaved:
        first, second = np.s_[..., :pairs], np.s_[..., pairs : 2 * pairs]
    a, b = x[first].copy(), x[second].copy()
    x[first], x[second] = a * cos - b * sin, b * cos + a * sin
    return x


@dataclass
class Moved:
    """A run: counts[b] tokens in block b, of view view[b] (-1: not moved), hidden bool [tokens]."""

    blocks: Blocks
    k: np.ndarray
    v: np.ndarray
    counts: np.ndarray
    view: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool
    hidden: np.ndarray | None

    @classmethod
    def of(cls, dtype, kv_heads, head_dim, block_size, counts, view, *, views, pairs, interleaved=False, hidden=None, seed=0):
        blocks = Blocks(dtype, kv_heads, head_dim, block_size, len(counts))
        tokens = int(sum(counts))
        k, v = (random((kv_heads, tokens, head_dim), dtype, seed + i) for i in range(2))
        done = 0
        for block, count in enumerate(counts):
            part = slice(done, done + count)
            assert blocks.write(block * block_size, k[:, part], v[:, part]) is None
            done += count
        if hidden is not None:
            hidden = np.random.default_rng(seed).random(tokens) < hidden
        cos, sin = angles(views, pairs, seed)
        return cls(blocks, k, v, np.array(counts, np.int32), np.array(view, np.int32), cos, sin, interleaved, hidden)

    @property
    def tokens(self) -> int:
        return self.k.shape[1]

    @property
    def seen(self) -> np.ndarray:
        """Those of the tokens that are not hidden; only blocks of the placement hide any."""
        placed = int(self.counts[: len(self.view)].sum())
        hidden = np.zeros(self.tokens, bool) if self.hidden is None else self.hidden
        return ~(hidden & (np.arange(self.tokens) < placed))

    def placement(self) -> _native.Placement:
        words = None
        if self.hidden is not None:
            size = self.blocks.geometry.block_size
            words = np.full((len(self.view), -(-size // 64) * 64), True)  # bits of slots that hold no token are not looked at
            ends = self.counts.cumsum()
            for block in range(len(self.view)):
                words[block, : self.counts[block]] = self.hidden[ends[block] - self.counts[block] : ends[block]]
            words = np.packbits(words, axis=1, bitorder="little").view(np.uint64)
        return _native.Placement(self.view, self.cos, self.sin, self.interleaved, words)

    def keys(self) -> np.ndarray:
        """As if they had been computed where they stand, float64."""
        view = np.full(len(self.counts), -1)
        view[: len(self.view)] = self.view
        of_token = view.repeat(self.counts)
        keys = self.k.astype(np.float64)
        for one in range(len(self.cos)):
            keys[:, of_token == one] = turned(keys[:, of_token == one], self.cos[one], self.sin[one], self.interleaved)
        return keys

    def expected(self, q, scale, ends):
        """out [q_heads, n, head_dim], lse and top [q_heads, n], float64: attention over re-rotated keys."""
        q = np.asarray(q).astype(np.float64)
        group = q.shape[0] // self.k.shape[0]
        seen = self.seen & (np.arange(self.tokens) < np.asarray(ends)[:, None])
        dots = np.einsum("hnd,htd->hnt", q, self.keys().repeat(group, axis=0))
        logits = np.where(seen, scale * dots, -np.inf)
        largest = logits.max(axis=-1, initial=-1e300, keepdims=True)
        weights = np.exp(logits - largest)
        total = weights.sum(axis=-1, keepdims=True)
        values = self.v.astype(np.float64).repeat(group, axis=0)
        out = np.einsum("hnt,htd->hnd", weights / np.where(total > 0, total, 1), values)
        with np.errstate(divide="ignore"):
            lse = (largest + np.log(total))[..., 0]
        return out, lse, np.where(seen, dots, -np.inf).max(axis=-1, initial=-np.inf)

    def attend(self, q, scale, *, causal=0, ends=None, placement=True, out_dtype=None, heads=(0, None)):
        out = np.full(q.shape, 7, DTYPES[out_dtype] if out_dtype else q.dtype)
        lse, top = np.full(q.shape[:2], 7, np.float32), np.full(q.shape[:2], 7, np.float32)
        given = self.blocks.geometry, bits(q), self.blocks.table, self.counts, causal, scale, bits(out), lse, top
        _native.attend(*given, *heads, ends=ends, placement=self.placement() if placement else None)
        return out, lse, top
