"""kvdb's DIPR over a cache, as a decode step of several sessions makes it."""

from __future__ import annotations

import math

import numpy as np
import torch

from benchmarks.gpu.cache import Cache
from benchmarks.gpu.card import Card
from benchmarks.gpu.decoding import Decoding
from kvdb.attention.triton import flat
from kvdb.attention.triton.batch import Piece
from kvdb.attention.triton.dipr import dipr
from kvdb.attention.triton.pages import Runs
from kvdb.attention.triton.workspace import DiprWorkspace


class Retrieving:
    """The window exactly, of the rest what is within the range, and both merged. q: `[sequences, q_heads, head_dim]`.

    tail: merge a third state, an estimate for what was not read: its mass as the codes have it, with the mean of all values.
    All sequences are equally long. out, lse: of the last call.
    """

    def __init__(self, card: Card, cache: Cache, q: torch.Tensor, alpha: float, *, tail: bool) -> None:
        self.cache, self.q, self.alpha, self.scale = cache, q, alpha, q.shape[-1] ** -0.5
        self.beta = -math.log(alpha) / self.scale
        size, tokens = cache.layout.block_size, cache.tokens[0]
        first, last = -(-card.sizes.sink // size), (tokens - card.sizes.recent) // size
        self.begin, self.end = first * size, last * size
        states = 2 + tail
        self._outs = torch.empty(states, *q.shape, device=card.device)
        self._lses = torch.empty(self._outs.shape[:3], device=card.device)
        self._window = Decoding(
            card, cache, q, [[Piece(slots[:first], self.begin), Piece(slots[last:], tokens - self.end)] for slots in cache.slots]
        )
        self._window.out, self._window.lse = self._outs[0], self._lses[0]
        self.mean = torch.stack([v[:, self.begin : self.end].float().mean(1) for v in cache.v])
        self.mean = self.mean.repeat_interleave(q.shape[1] // cache.layout.kv_heads, dim=1)
        middle = np.concatenate([slots[first:last] for slots in cache.slots])
        begins = np.arange(cache.sequences) * (last - first)
        table, begin, lengths = (
            torch.from_numpy(x.astype(np.int32)).to(card.device)
            for x in (middle, begins, np.full(cache.sequences, self.end - self.begin))
        )
        self._runs = Runs(table, begin, lengths, self.end - self.begin)
        self._workspace = DiprWorkspace.of(cache.layout, cache.sequences, q.shape[1], self.end - self.begin, card.device)
        self.selection = self._workspace.selection
        self.out, self.lse = self._outs[0], self._lses[0]

    @property
    def tail(self) -> bool:
        return len(self._outs) > 2

    def poison(self) -> None:
        for x in (self._outs, self._lses, self._window.top, self.selection.missed, self.selection.missed_bound):
            x.fill_(torch.nan)
        if self.tail:
            self._outs[2] = self.mean

    def __call__(self) -> None:
        window, outs, lses = self._window, self._outs, self._lses
        window()
        pages = self.cache.pages
        dipr(self.q, pages, self._runs, self.scale, self.beta, window.top, self._workspace, outs[1], lses[1])
        if self.tail:
            lses[2] = self.selection.missed
        self.lse = torch.logsumexp(lses, 0)
        self.out = torch.einsum("nsh,nshd->shd", torch.exp(lses - self.lse), outs).to(self.q.dtype)

    def attended(self, sequence: int) -> torch.Tensor:
        """Which tokens each KV head attended: bool `[kv_heads, tokens]`."""
        kv_heads, n = self.cache.layout.kv_heads, self.cache.tokens[sequence]
        kept = torch.zeros(kv_heads, n, dtype=torch.bool, device=self.q.device)
        kept[:, : self.begin] = kept[:, self.end :] = True
        capacity = self.selection.ids.shape[2]
        for head, count in enumerate(self.selection.counts[sequence].tolist()):
            if count > capacity:
                kept[head] = True
            else:
                kept[head, self.begin + self.selection.ids[sequence, head, :count].long()] = True
        return kept


def encode(card: Card, cache: Cache) -> None:
    """Writes the index pages of every slot."""
    size = cache.layout.block_size
    for table, tokens in zip(cache.tables, cache.tokens, strict=True):
        counts = torch.full((len(table),), size, dtype=torch.int32, device=card.device)
        counts[-1] = tokens - (len(table) - 1) * size
        flat.encode(cache.pages, table, counts)
