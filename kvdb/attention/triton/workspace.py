"""The selection that retrieval makes, and the memory that its launches share."""

from dataclasses import dataclass

import torch

from kvdb.attention.triton.pages import INTERPRETED
from kvdb.storage.slot import SlotLayout

TILE = 64
"""The most tokens of a tile, whose estimates one record sums up. A tile lies in one block."""
PROGRAMS = 16 if INTERPRETED else 1056
"""Programs that fill a card: eight for each of 132 multiprocessors. The interpreter runs one after the other."""
SPLITS_MAX = 64
"""The most parts that the attention of one sequence is split into."""


@dataclass(frozen=True)
class Selection:
    """The tokens or pages that are read of each sequence and KV head, and the mass of those that are not.

    ids: int32 `[sequences, kv_heads, capacity]`, tokens or pages of a run in no order. counts: int32 `[sequences, kv_heads]`; a
    count beyond the capacity means that everything is read. missed, missed_bound: float32 `[sequences, q_heads]`, the natural
    log of the sum of exp(scale * q.k) over what is not read: an estimate, and what is never below the truth but for rounding. Of
    what is less than e^-69 of the largest weight anywhere, the estimate knows nothing.
    """

    ids: torch.Tensor
    counts: torch.Tensor
    missed: torch.Tensor
    missed_bound: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that it holds on the device."""
        return self.ids, self.counts, self.missed, self.missed_bound


@dataclass(frozen=True)
class Partials:
    """The states of attention that is split into parts. out: float32 `[sequences, q_heads, splits, head_dim]`. lse, top: float32
    `[sequences, q_heads, splits]`. done: int32 `[sequences, kv_heads]`, how many parts are done, zero between launches."""

    out: torch.Tensor
    lse: torch.Tensor
    top: torch.Tensor
    done: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that it holds on the device."""
        return self.out, self.lse, self.top, self.done

    @property
    def splits(self) -> int:
        return int(self.lse.shape[2])

    @classmethod
    def of(cls, sequences: int, q_heads: int, kv_heads: int, head_dim: int, device: torch.device) -> "Partials":
        useful = min(SPLITS_MAX, max(1, PROGRAMS // max(1, sequences * kv_heads)))
        splits = 1 << (useful.bit_length() - 1)
        out = torch.empty((sequences, q_heads, splits, head_dim), dtype=torch.float32, device=device)
        lse, top = (torch.empty((sequences, q_heads, splits), dtype=torch.float32, device=device) for _ in range(2))
        return cls(out, lse, top, torch.zeros((sequences, kv_heads), dtype=torch.int32, device=device))


@dataclass(frozen=True)
class DiprWorkspace:
    """The memory of a DIPR search, allocated once for a number of sequences and tokens, and used by one query after the other.

    best: float32 `[sequences, q_heads]`, the largest lower bound of q.k. bases: float32
    `[sequences, kv_heads, blocks, group]`, q.centre. records: float32 `[sequences, kv_heads, tiles, 3, group]`, the largest upper
    bound of a tile's tokens, and the log-sum-exp of their estimates and of their upper bounds. sums: float32
    `[2, sequences, q_heads]`, over what is not read. done: int32 `[sequences, kv_heads]`, zero between launches.
    """

    tokens_max: int
    selection: Selection
    partials: Partials
    best: torch.Tensor
    bases: torch.Tensor
    records: torch.Tensor
    sums: torch.Tensor
    done: torch.Tensor

    @classmethod
    def of(
        cls, layout: SlotLayout, sequences: int, q_heads: int, tokens_max: int, device: torch.device, capacity: int | None = None
    ) -> "DiprWorkspace":
        """Allocate one. capacity: the most tokens of a KV head that are read one by one; a quarter of all by default."""
        heads, group = layout.kv_heads, q_heads // layout.kv_heads
        capacity = capacity or max(TILE, tokens_max // 4)
        tiles = -(-tokens_max // layout.block_size) * tiles_of_block(layout)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        ids = torch.empty((sequences, heads, capacity), dtype=torch.int32, device=device)
        counts, done = (torch.zeros((sequences, heads), dtype=torch.int32, device=device) for _ in range(2))
        selection = Selection(ids, counts, floats(sequences, q_heads), floats(sequences, q_heads))
        partials = Partials.of(sequences, q_heads, heads, layout.head_dim, device)
        best, bases = floats(sequences, q_heads), floats(sequences, heads, tiles // tiles_of_block(layout), group)
        records = floats(sequences, heads, tiles, 3, group)
        return cls(tokens_max, selection, partials, best, bases, records, floats(2, sequences, q_heads), done)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that it holds on the device."""
        own = self.best, self.bases, self.records, self.sums, self.done
        return *self.selection.tensors(), *self.partials.tensors(), *own


def tile_of(layout: SlotLayout) -> int:
    """Tokens of a tile. The last tile of a block may have fewer."""
    tile = 16
    while tile < min(TILE, layout.block_size):
        tile *= 2
    return tile


def tiles_of_block(layout: SlotLayout) -> int:
    return -(-layout.block_size // tile_of(layout))
