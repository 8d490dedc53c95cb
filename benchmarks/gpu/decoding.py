"""kvdb's decode kernel over a cache, as the questions ask it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu import reference
from benchmarks.gpu.cache import Cache
from benchmarks.gpu.card import Card
from benchmarks.gpu.reference import Exact
from kvdb.attention.triton.batch import Batch, Piece
from kvdb.attention.triton.decode import decode


class Decoding:
    """One step over a cache. q: `[sequences, q_heads, head_dim]`. pieces: of each sequence; None for a cache's own sequences.

    out, lse: as the kernel leaves them; poisoned before the first call, and by `poison`.
    """

    def __init__(self, card: Card, cache: Cache, q: torch.Tensor, pieces: Sequence[Sequence[Piece]] | None = None) -> None:
        self.cache, self.q, self.scale = cache, q, q.shape[-1] ** -0.5
        own = [[Piece(slots, tokens)] for slots, tokens in zip(cache.slots, cache.tokens, strict=True)]
        group = q.shape[1] // cache.layout.kv_heads
        self.batch = Batch(pieces or own, group, card.device, layout=cache.layout)
        self.out = reference.poisoned(*q.shape, dtype=q.dtype, device=card.device)
        self.lse = reference.poisoned(*q.shape[:2], dtype=torch.float32, device=card.device)
        self.top = reference.poisoned(*q.shape[:2], dtype=torch.float32, device=card.device)

    def __call__(self) -> None:
        decode(self.q, self.cache.pages, self.batch, self.scale, self.out, self.lse, self.top)

    def poison(self) -> None:
        for x in (self.out, self.lse, self.top):
            x.fill_(torch.nan)

    def check(self, what: str, exact: Exact) -> float:
        """The relative error of a fresh call. Raises Wrong."""
        self.poison()
        self()
        error = reference.check(what, self.out, self.lse, exact)
        reference.near(f"{what}, largest q.k", self.top, exact.top)
        return error


def exact(cache: Cache, q: torch.Tensor) -> Exact:
    """The exact attention of each sequence over the contents of its slots."""
    scale = q.shape[-1] ** -0.5
    return reference.stacked([reference.attention(q[i], *cache.loaded(i), scale) for i in range(cache.sequences)])
