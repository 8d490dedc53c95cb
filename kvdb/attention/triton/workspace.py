"""What retrieval finds, and the memory that lies between its launches."""

from dataclasses import dataclass

import torch

from kvdb.attention.triton.pages import INTERPRETED
from kvdb.storage.slot import SlotLayout

TILE = 64
"""Tokens whose estimates are summed up in one record, at most; a tile lies in one block."""
PROGRAMS = 16 if INTERPRETED else 1056
"""Programs of a launch that fill a card: eight for each of 132 multiprocessors. The interpreter runs one after the other."""
SPLITS_MAX = 64
"""Parts that one sequence's attention is cut into at most."""


@dataclass(frozen=True)
class Found:
    """What is to be read of each sequence and KV head, and what is not.

    ids: int32 `[sequences, kv_heads, capacity]`, tokens or pages of a run in no order. counts: int32 `[sequences, kv_heads]`; a
    count beyond the capacity means that everything is read. missed, missed_bound: float32 `[sequences, q_heads]`, the natural
    log of the sum of exp(scale * q.k) over what is not read: an estimate, and what is never below the truth but for rounding. Of
    what is less than e^-69 of the largest weight anywhere, the estimate knows nothing.
    """

    ids: torch.Tensor
    counts: torch.Tensor
    missed: torch.Tensor
    missed_bound: torch.Tensor


@dataclass(frozen=True)
class Partials:
    """Of attention cut into parts: out float32 `[sequences, q_heads, splits, head_dim]`, lse and top `[sequences, q_heads,
    splits]`, and how many parts are done, int32 `[sequences, kv_heads]`, zero between launches."""

    out: torch.Tensor
    lse: torch.Tensor
    top: torch.Tensor
    done: torch.Tensor

    @property
    def splits(self) -> int:
        return int(self.lse.shape[2])

    @classmethod
    def of(cls, sequences: int, q_heads: int, kv_heads: int, head_dim: int, device: torch.device) -> "Partials":
        wanted = min(SPLITS_MAX, max(1, PROGRAMS // max(1, sequences * kv_heads)))
        splits = 1 << (wanted.bit_length() - 1)
        out = torch.empty((sequences, q_heads, splits, head_dim), dtype=torch.float32, device=device)
        lse, top = (torch.empty((sequences, q_heads, splits), dtype=torch.float32, device=device) for _ in range(2))
        return cls(out, lse, top, torch.zeros((sequences, kv_heads), dtype=torch.int32, device=device))


@dataclass(frozen=True)
class Workspace:
    """Allocated once for so many sequences of at most so many tokens, and used by one query after the other.

    best: float32 `[sequences, q_heads]`, the largest lower bound of q.k. bases: float32 `[sequences, kv_heads,
    blocks, group]`, q.centre. records: float32 `[sequences, kv_heads, tiles, 3,
    group]`, of a tile's tokens the largest upper bound, and the log-sum-exp of estimates and of upper bounds. sums: float32
    `[2, sequences, q_heads]`. done: int32 `[sequences, kv_heads]`, zero between launches.
    """

    tokens_max: int
    found: Found
    partials: Partials
    best: torch.Tensor
    bases: torch.Tensor
    records: torch.Tensor
    sums: torch.Tensor
    done: torch.Tensor

    @classmethod
    def of(
        cls, layout: SlotLayout, sequences: int, q_heads: int, tokens_max: int, device: torch.device, capacity: int | None = None
    ) -> "Workspace":
        """capacity: tokens of a KV head that are read one by one, at most; a quarter of all by default."""
        heads, group = layout.kv_heads, q_heads // layout.kv_heads
        capacity = capacity or max(TILE, tokens_max // 4)
        tiles = -(-tokens_max // layout.block_size) * tiles_of_block(layout)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        ids = torch.empty((sequences, heads, capacity), dtype=torch.int32, device=device)
        counts, done = (torch.zeros((sequences, heads), dtype=torch.int32, device=device) for _ in range(2))
        found = Found(ids, counts, floats(sequences, q_heads), floats(sequences, q_heads))
        partials = Partials.of(sequences, q_heads, heads, layout.head_dim, device)
        best, bases = floats(sequences, q_heads), floats(sequences, heads, tiles // tiles_of_block(layout), group)
        records = floats(sequences, heads, tiles, 3, group)
        return cls(tokens_max, found, partials, best, bases, records, floats(2, sequences, q_heads), done)


def tile_of(layout: SlotLayout) -> int:
    """Tokens of a tile; the last of a block may be cut."""
    tile = 16
    while tile < min(TILE, layout.block_size):
        tile *= 2
    return tile


def tiles_of_block(layout: SlotLayout) -> int:
    return -(-layout.block_size // tile_of(layout))
