"""The sharp heads of benchmarks/workloads.py, made on the card, since those of sixty-four heads take minutes on the host.

The same model with the same numbers; see there for what it follows. The random numbers differ.
"""

from __future__ import annotations

import math

import torch

from benchmarks.gpu.card import Card
from benchmarks.workloads import MASS, PATTERNS, PEAK, PLANTED, SHARP_TOKENS, SINKS, THETA, TOPICS

BISECTIONS = 30


def sharp(card: Card, seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One session's layer: k, v bfloat16 `[kv_heads, tokens, head_dim]`, and a decode step's q, bfloat16 `[q_heads, head_dim]`,
    each query as long as to have MASS of its softmax mass in SHARP_TOKENS tokens."""
    sizes, generator = card.sizes, card.generator(seed)
    k = torch.empty(sizes.kv_heads, tokens, sizes.head_dim, dtype=torch.bfloat16, device=card.device)
    v = torch.empty_like(k)
    q = torch.empty(sizes.kv_heads, sizes.group, sizes.head_dim, dtype=torch.bfloat16, device=card.device)
    turns = _angles(torch.arange(tokens, device=card.device), sizes.head_dim)
    behind = _angles(torch.full((sizes.group,), tokens, device=card.device), sizes.head_dim)
    for head in range(sizes.kv_heads):
        maker = _Head(generator, card.device, tokens, sizes.head_dim)
        k[head], v[head] = _rotate(maker.keys(), turns), maker.values()
        raw = _rotate(maker.queries(sizes.group), behind)
        q[head] = _sharpen(raw, k[head].float())
    return k, v, q.flatten(0, 1)


class _Head:
    def __init__(self, generator: torch.Generator, device: torch.device, tokens: int, d: int) -> None:
        self._generator, self._device, self._n, self._d = generator, device, tokens, d
        pair = torch.arange(d, device=device) % (d // 2)
        self._slow = (pair >= 3 * d // 8).float()
        self._offset = torch.zeros(d, device=device)
        slow = self._slow.nonzero().flatten()
        heavy = slow[torch.randperm(len(slow), generator=generator, device=device)[:4]]
        self._offset[heavy] = torch.where(self._uniform(4) < 0.5, -1.0, 1.0) * (4 + 6 * self._uniform(4))
        self._topics = 0.6 * self._directions(TOPICS)
        snapshot = self._directions(PATTERNS + 1, apart=True)
        self._patterns, self._pull = snapshot[1:], snapshot[0]
        spans = torch.randint(50, 800, (tokens // 50 + 1,), generator=generator, device=device)
        which = torch.randint(TOPICS, spans.shape, generator=generator, device=device)
        self._topic = torch.repeat_interleave(which, spans)[:tokens]

    def keys(self) -> torch.Tensor:
        k = self._normal(self._n, self._d) + self._topics[self._topic] + self._offset
        free = torch.randperm(self._n - SINKS, generator=self._generator, device=self._device) + SINKS
        for number, pattern in enumerate(self._patterns):
            where = free[number * PLANTED : (number + 1) * PLANTED]
            amount = PEAK * (1 - (torch.arange(len(where), device=self._device) / PLANTED) ** 8)
            k[where] = 0.4 * self._normal(len(where), self._d) + self._offset + amount[:, None] * pattern
        k[:SINKS] += 0.8 * self._pull
        return k

    def values(self) -> torch.Tensor:
        means = self._normal(TOPICS, self._d)
        return self._normal(self._n, self._d) + 0.5 * means[self._topic]

    def queries(self, count: int) -> torch.Tensor:
        wanted = self._patterns[torch.randint(PATTERNS, (count,), generator=self._generator, device=self._device)]
        bias = 0.5 * self._offset.sign() * self._offset.abs() ** 0.5
        return wanted + 0.3 * self._pull + 0.35 * self._normal(count, self._d) + bias

    def _directions(self, count: int, apart: bool = False) -> torch.Tensor:
        x = self._normal(count, self._d) * self._slow
        if apart and count <= int(self._slow.sum()):
            x = torch.linalg.qr(x.T)[0].T
        return x / x.norm(dim=1, keepdim=True) * math.sqrt(self._d)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device)

    def _uniform(self, count: int) -> torch.Tensor:
        return torch.rand(count, generator=self._generator, device=self._device)


def _angles(positions: torch.Tensor, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, since a million times a frequency has no digits left in float32."""
    half = d // 2
    angles = positions[:, None].double() * THETA ** (-torch.arange(half, device=positions.device).double() / half)
    return angles.cos().float(), angles.sin().float()


def _rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """RoPE in the half layout, `[n, d]`."""
    cos, sin = angles
    low, high = x.chunk(2, dim=1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=1)


def _sharpen(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Each query times what puts MASS of its softmax mass into its SHARP_TOKENS largest tokens, by bisection."""
    logits = (q @ keys.T).double() / math.sqrt(q.shape[1])
    logits = (logits - logits.amax(1, keepdim=True)).sort(dim=1, descending=True).values
    low = torch.full((len(q), 1), 0.01, dtype=torch.float64, device=q.device)
    high = torch.full_like(low, 50.0)
    for _ in range(BISECTIONS):
        middle = (low * high).sqrt()
        weights = (logits * middle).exp()
        less = weights[:, :SHARP_TOKENS].sum(1, keepdim=True) / weights.sum(1, keepdim=True) < MASS
        low, high = torch.where(less, middle, low), torch.where(less, high, middle)
    return q * (low * high).sqrt().float()
