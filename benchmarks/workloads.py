"""Keys, values and queries as real heads show them, for measuring retrieval. Never isotropic Gaussians alone.

What is modelled, before RoPE: a few heavy channels with a constant offset (KIVI, arXiv 2402.02750), sink tokens that take mass
from every query (StreamingLLM, arXiv 2309.17453), keys clustered by topics that come in spans, queries off the keys'
distribution (RetrievalAttention, arXiv 2409.10516), and RoPE on top. A query of a sharp head looks for one planted pattern,
of which some hundred tokens carry a graded amount; one of a diffuse head for a topic. Each query's length is then set by
bisection so that 90 % of its softmax mass lies in SHARP_TOKENS or DIFFUSE_TOKENS tokens.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

SHARP_TOKENS = 50
DIFFUSE_TOKENS = 40_000
MASS = 0.9
SINKS = 4
TOPICS = 96
PATTERNS = 16
PLANTED = 96  # tokens that carry one pattern, the first PEAK times its direction, the others less
PEAK = 2.0
THETA = 5e7  # as in models made for a million tokens
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SMALL = 1 << 22
"""Elements of a layer's keys that are made sooner by this process than others are started."""


@dataclass(frozen=True)
class Workload:
    """One layer. k, v: `[kv_heads, n, head_dim]`, keys after RoPE. queries: float32 `[q_heads, m, head_dim]`, exact in dtype,
    those of decode steps behind token n. query_samples: as queries, others of the same kind, for indexes to learn from."""

    name: str
    k: npt.NDArray[np.generic]
    v: npt.NDArray[np.generic]
    queries: Float32
    query_samples: Float32

    @property
    def scale(self) -> float:
        return float(self.k.shape[-1]) ** -0.5


@dataclass(frozen=True)
class Shape:
    """kv_heads KV heads, each shared by `group` query heads."""

    tokens: int
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    dtype: np.dtype[np.generic] = BFLOAT16


def generate(
    kind: str, shape: Shape, queries: int = 8, query_samples: int = 256, seed: int = 0, cache: Path | None = None
) -> Workload:
    """A layer of heads of one kind, "sharp" or "diffuse". Equal arguments give equal arrays.

    cache: a folder that keeps what was made before; without one the arrays lie in files that are deleted already. They are
    mapped, so memory is needed only for what is touched. Heads of large layers are made by as many processes as there are CPUs.
    """
    if kind not in {"sharp", "diffuse"}:
        raise ValueError(f"kind is {kind!r}; expected sharp or diffuse")
    if cache is None:
        with TemporaryDirectory() as passing:
            return generate(kind, shape, queries, query_samples, seed, Path(passing))
    heads, rows = shape.kv_heads, shape.group * (queries + query_samples)
    name = f"{kind}-{shape.tokens}x{heads}x{shape.group}x{shape.head_dim}-{shape.dtype.name}-{queries}-{query_samples}-{seed}"
    folder = cache / name
    if not folder.exists():
        started = Path(f"{folder}.part")
        started.mkdir(parents=True, exist_ok=True)
        keys = (heads, shape.tokens, shape.head_dim)
        stored = np.dtype(f"u{shape.dtype.itemsize}")  # npy files know no bfloat16
        for array, size, dtype in (("k", keys, stored), ("v", keys, stored), ("q", (heads, rows, keys[2]), np.dtype(np.float32))):
            np.lib.format.open_memmap(started / f"{array}.npy", "w+", dtype, size)
        make = partial(_make_head, started, kind, shape, rows, seed)
        if heads * shape.tokens * shape.head_dim <= SMALL:
            for head in range(heads):
                make(head)
        else:
            with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
                list(pool.map(make, range(heads)))
        started.rename(folder)
    k, v, q = (np.load(folder / f"{array}.npy", mmap_mode="r") for array in "kvq")
    q = q.reshape(heads * shape.group, queries + query_samples, shape.head_dim)
    asked, learnt = (np.ascontiguousarray(part) for part in (q[:, :queries], q[:, queries:]))
    return Workload(kind, k.view(shape.dtype), v.view(shape.dtype), asked, learnt)


def _make_head(folder: Path, kind: str, shape: Shape, rows: int, seed: int, head: int) -> None:
    """One KV head, into its rows of the arrays that lie in the folder."""
    k, v, q = (np.load(folder / f"{array}.npy", mmap_mode="r+")[head] for array in "kvq")
    rng = np.random.default_rng([seed, head, kind == "sharp"])
    maker = _Head(rng, shape)
    keys = _rotate(maker.keys(), np.arange(shape.tokens)).astype(shape.dtype)
    k[:], v[:] = keys.view(k.dtype), maker.values().astype(shape.dtype).view(v.dtype)
    wanted = SHARP_TOKENS if kind == "sharp" else min(DIFFUSE_TOKENS, shape.tokens // 3)
    positions = shape.tokens + rng.integers(0, 512, rows)
    raw = _rotate(maker.queries(kind, rows), positions)
    q[:] = _sharpen(raw, keys.astype(np.float32), wanted).astype(shape.dtype).astype(np.float32)


class _Head:
    """One KV head before RoPE. What lasts over distance lies in the slowest quarter of the rotary pairs, as in trained models."""

    def __init__(self, rng: np.random.Generator, shape: Shape) -> None:
        self._rng = rng
        self._n, self._d = shape.tokens, shape.head_dim
        d = self._d
        pair = np.arange(d) % (d // 2)
        self._slow = (pair >= 3 * d // 8).astype(np.float32)
        self._offset = np.zeros(d, np.float32)
        heavy = rng.choice(np.flatnonzero(self._slow), 4, replace=False)
        self._offset[heavy] = rng.choice([-1, 1], 4) * rng.uniform(4, 10, 4)
        self._topics = 0.6 * self._directions(TOPICS)
        snapshot = self._directions(PATTERNS + 1, apart=True)
        self._patterns = snapshot[1:]
        self._pull = snapshot[0]  # shared by all queries; the sinks answer to it

    def _directions(self, count: int, apart: bool = False) -> Float32:
        """Directions as long as a key's noise, in the slow dimensions; apart: orthogonal, as far as there are dimensions."""
        x = self._rng.standard_normal((count, self._d)) * self._slow
        if apart and count <= self._slow.sum():
            x = np.linalg.qr(x.T)[0].T
        return (x / np.linalg.norm(x, axis=1, keepdims=True) * np.sqrt(self._d)).astype(np.float32)

    def keys(self) -> Float32:
        rng, n = self._rng, self._n
        self._topic = np.empty(n, np.int64)
        at = 0
        while at < n:
            span = int(rng.integers(50, 800))
            self._topic[at : at + span] = rng.integers(TOPICS)
            at += span
        k = rng.standard_normal((n, self._d), np.float32)
        k += self._topics[self._topic] + self._offset
        free = rng.permutation(np.arange(SINKS, n))
        for number, pattern in enumerate(self._patterns):
            where = free[number * PLANTED : (number + 1) * PLANTED]
            amount = PEAK * (1 - (np.arange(len(where)) / PLANTED) ** 8)
            noise = 0.4 * rng.standard_normal((len(where), self._d), np.float32)
            k[where] = noise + self._offset + amount[:, None].astype(np.float32) * pattern
        k[:SINKS] += 0.8 * self._pull
        return k

    def values(self) -> Float32:
        means = self._rng.standard_normal((TOPICS, self._d)).astype(np.float32)
        return self._rng.standard_normal((self._n, self._d), np.float32) + 0.5 * means[self._topic]

    def queries(self, kind: str, count: int) -> Float32:
        rng = self._rng
        wanted = (self._patterns if kind == "sharp" else self._topics)[rng.integers(PATTERNS, size=count)]
        noise = rng.standard_normal((count, self._d), np.float32)
        bias = 0.5 * np.sign(self._offset) * np.abs(self._offset) ** 0.5
        return (wanted + 0.3 * self._pull + 0.35 * noise + bias).astype(np.float32)


def _rotate(x: Float32, positions: npt.NDArray[np.int64]) -> Float32:
    """RoPE in the half layout, `[n, d]`."""
    half = x.shape[1] // 2
    angles = positions[:, None] * THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = x[:, :half], x[:, half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=1)


def _sharpen(q: Float32, keys: Float32, wanted: int, step: int = 64) -> Float32:
    """Each query times what puts MASS of its softmax mass into its `wanted` largest tokens."""
    out = np.empty_like(q)
    for at in range(0, len(q), step):
        logits = q[at : at + step] @ keys.T / np.sqrt(q.shape[1])
        logits -= logits.max(axis=1, keepdims=True)
        logits.sort(axis=1)
        out[at : at + step] = q[at : at + step] * _lengths(logits[:, -wanted:], logits)[:, None]
    return out


def _lengths(top: Float32, everything: Float32) -> Float32:
    # The sorted logits are thinned out for speed: of the smaller ones every eighth stands for all.
    n = everything.shape[1]
    cut = n - min(n, 8192)
    head, rest = everything[:, cut:], everything[:, :cut:8]
    low, high = np.full(len(top), 0.01, np.float32), np.full(len(top), 50, np.float32)
    for _ in range(24):
        middle = np.sqrt(low * high)
        whole = np.exp(head * middle[:, None]).sum(1) + 8 * np.exp(rest * middle[:, None]).sum(1)
        share = np.exp(top * middle[:, None]).sum(1) / whole
        low, high = np.where(share < MASS, middle, low), np.where(share < MASS, high, middle)
    return np.sqrt(low * high).astype(np.float32)
