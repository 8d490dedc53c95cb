"""Sequences of several lengths in the slots of one slab, with their index pages, for tests of retrieval."""

from dataclasses import dataclass

import torch

from kvdb.attention.triton import flat
from kvdb.attention.triton.pages import Pages, Runs
from kvdb.storage.slot import SlotLayout
from tests.kvdb.attention.triton.reference import CPU, attention, fill, make_pages, read


@dataclass
class Sequences:
    """slots: of each sequence."""

    pages: Pages
    runs: Runs
    slots: list
    lengths: list

    @classmethod
    def of(cls, layout: SlotLayout, lengths, seed=0, device=CPU, k=None):
        """Random ones of these lengths, in slots in random order. k: keys of each, in place of random ones."""
        rng = torch.Generator().manual_seed(seed)
        blocks = [-(-n // layout.block_size) for n in lengths]
        pages = make_pages(layout, sum(blocks) + 2, device)
        order = torch.randperm(sum(blocks) + 2, generator=rng)[: sum(blocks)].to(torch.int32)
        slots = [part.tolist() for part in order.split(blocks)]
        for number, (own, n) in enumerate(zip(slots, lengths, strict=True)):
            fill(pages, own, n, seed=1000 * seed + number, k=None if k is None else k[number])
        begin = torch.tensor([0, *blocks], dtype=torch.int32).cumsum(0)[:-1].to(torch.int32)
        tokens = torch.tensor(lengths, dtype=torch.int32)
        runs = Runs(order.to(device), begin.to(device), tokens.to(device), max([*lengths, 0]))
        made = cls(pages, runs, slots, list(lengths))
        flat.encode(pages, order.to(device), made.counts().to(device))
        return made

    def counts(self):
        """Tokens of each slot, in the order of the table."""
        size = self.pages.layout.block_size
        return torch.tensor(
            [min(size, n - at) for n in self.lengths for at in range(0, n, size)],
            dtype=torch.int32,
        )

    def keys(self, sequence):
        return read(self.pages, self.slots[sequence], self.lengths[sequence])[0]

    def scores(self, q, sequence):
        """q.k, float64 `[q_heads, tokens]`; q `[q_heads, head_dim]`."""
        k = self.keys(sequence)
        return (q.double()[:, None] @ k.repeat_interleave(len(q) // len(k), 0).transpose(1, 2))[:, 0]

    def attention(self, q, sequence, scale, visible=None):
        """The out, lse and top of one query `[q_heads, head_dim]`. visible: bool `[q_heads, tokens]`."""
        k, v = read(self.pages, self.slots[sequence], self.lengths[sequence])
        states = attention(q[:, None], k, v, scale, None if visible is None else visible[:, None])
        return [x[:, 0] for x in states]


def queries(sequences, q_heads, head_dim, seed=0, length=3.0, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    return (length * torch.randn(sequences, q_heads, head_dim, generator=rng)).to(dtype)


def nan(*shape, dtype=torch.float32):
    """What an output holds before a kernel writes it."""
    return torch.full(shape, torch.nan, dtype=dtype)
