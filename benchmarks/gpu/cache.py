"""A paged KV cache on the card, filled with what is given, and the same keys and values side by side for the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.gpu.card import Card, Sizes
from kvdb.attention.triton import blocks
from kvdb.attention.triton.pages import Pages
from kvdb.storage.slot import SLOT_FORMATS, SlotLayout

POISON = 0xFF
"""Every byte of a slab that nothing was written to: NaN in every format that has one."""


class Cache:
    """Sequences in slots in random order, as they lie after a while of use.

    k, v: of each sequence, `[kv_heads, tokens, head_dim]`, as they were before they went into a format; one contiguous tensor
    `[sequences, ...]` where they are equally long. What a last block has no token for stays poisoned.
    """

    def __init__(
        self, card: Card, k: torch.Tensor | Sequence[torch.Tensor], v: torch.Tensor | Sequence[torch.Tensor], seed: int,
        storage: str = "bfloat16",
    ) -> None:  # fmt: skip
        self.k, self.v = k, v
        kv_heads, _, head_dim = k[0].shape
        self.layout = SlotLayout(storage, kv_heads, head_dim, card.sizes.block_size)
        self.tokens = [int(x.shape[1]) for x in k]
        counts = [-(-n // self.layout.block_size) for n in self.tokens]
        order = np.random.default_rng(seed).permutation(sum(counts)).astype(np.int32)
        self.slots = np.split(order, np.cumsum(counts)[:-1])
        self.tables = [torch.from_numpy(slots).to(card.device) for slots in self.slots]
        slab = torch.full((len(order), self.layout.nbytes), POISON, dtype=torch.uint8, device=card.device)
        self.pages = Pages(slab, self.layout)
        for table, keys, values in zip(self.tables, k, v, strict=True):
            blocks.store(self.pages, table, 0, keys, values)

    @property
    def sequences(self) -> int:
        return len(self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values with their scales, in the cache's format."""
        rows = 2 * self.layout.kv_heads * sum(self.tokens)
        return rows * (self.layout.head_dim * SLOT_FORMATS[self.layout.format] + (4 if self.layout.quantised else 0))

    def loaded(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the format made of a sequence's keys and values: float32 `[kv_heads, tokens, head_dim]`, read by torch alone."""
        return self._plane(0, sequence), self._plane(1, sequence)

    def _plane(self, plane: int, sequence: int) -> torch.Tensor:
        heads, size, dim = self.layout.kv_heads, self.layout.block_size, self.layout.head_dim
        slots = self.tables[sequence].long()
        elements = self.pages.elements
        at = plane * self.layout.values_at // elements.element_size()
        area = elements.view(torch.uint8 if self.layout.quantised else elements.dtype)[:, at : at + heads * size * dim]
        x = area[slots].view(elements.dtype).float().view(-1, heads, size, dim)
        if self.layout.quantised:
            first = self.layout.scales_at // 4 + plane * heads * size
            x *= self.pages.floats[:, first : first + heads * size][slots].view(-1, heads, size, 1)
        return x.transpose(0, 1).reshape(heads, -1, dim)[:, : self.tokens[sequence]]


def nbytes(sizes: Sizes, sequences: int, tokens: int, storage: str = "bfloat16") -> int:
    """Bytes of such a cache, with the contiguous keys and values."""
    layout = SlotLayout(storage, sizes.kv_heads, sizes.head_dim, sizes.block_size)
    paged = -(-tokens // sizes.block_size) * layout.nbytes
    return sequences * (paged + sizes.kv_nbytes(tokens))


def random(card: Card, seed: int, sequences: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of independent normal elements, bfloat16 `[sequences, kv_heads, tokens, head_dim]`."""
    shape = (sequences, card.sizes.kv_heads, tokens, card.sizes.head_dim)
    generator = card.generator(seed)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device=card.device) for _ in "kv")
    for x in (k, v):
        for i in range(sequences):  # one at a time, for what randn takes beside its result
            x[i] = torch.randn(shape[1:], generator=generator, device=card.device, dtype=torch.float32).bfloat16()
    return k, v


def asking(card: Card, seed: int, keys: Sequence[torch.Tensor]) -> torch.Tensor:
    """Queries of one step, bfloat16 `[sequences, q_heads, head_dim]`; keys: of each sequence, `[kv_heads, tokens, head_dim]`.

    Each query looks for two tokens, which take most of its mass: of the first query heads those at the ends and beside the edges
    of blocks, of the others random ones. So a token that is lost or read twice there shows in the output.
    """
    sizes = card.sizes
    rng = np.random.default_rng(seed)
    queries = torch.empty(len(keys), sizes.q_heads, sizes.head_dim, dtype=torch.bfloat16, device=card.device)
    for sequence, k in enumerate(keys):
        n, size = k.shape[1], sizes.block_size
        edges = [n - 1, 0, (n - 1) // size * size, (n - 1) // size * size - 1, min(size, n - 1), min(size, n) - 1]
        wanted = rng.integers(0, n, (sizes.q_heads, 2))
        for head, edge in enumerate(edges[: sizes.q_heads]):
            wanted[head, 0] = max(edge, 0)
        at = torch.from_numpy(wanted).to(card.device)
        heads = torch.arange(sizes.q_heads, device=card.device) // sizes.group
        picked = k[heads[:, None], at].float().sum(1)
        # As long as to give these tokens about 16 in the softmax, where the others are near 0.
        queries[sequence] = picked * (16.0 / sizes.head_dim**0.5)
    return queries
