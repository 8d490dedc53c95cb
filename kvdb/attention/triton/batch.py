"""The tables of a launch: which tokens are read for which sequences, and how they are divided among programs. They are made once
on the host and read on the device."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvdb.storage.slot import SlotLayout

TILE_ROWS = (16, 64, 128)
"""Query rows of a tile. One program answers at most as many as the last."""
NARROW_PROGRAMS = 3
"""Programs with the narrowest tile that fit on a multiprocessor at once, by shared memory and registers
(tests/kvdb/attention/triton/compiled.py measures both). Only one with a wider tile fits."""
PROGRAM_INTS = 8
"""int32 in a program's row: piece, split, splits, first member, number of members, and padding to 32 bytes."""
SPLIT_TOKENS_MIN = 256
"""The fewest tokens that a program reads. With fewer, starting it and merging its state would cost as much as reading."""
SPLIT_TOKENS_MAX = 4096
"""The most tokens that a program with the narrowest tile reads. With more, the last programs leave others idle for longer."""
Angles = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
Ints = npt.NDArray[np.int32]
SplitTokens = Callable[[int, list[int]], int]
"""Takes the rows of a tile and the tokens of each item of a launch; returns how many tokens a program reads."""


@dataclass(frozen=True)
class Piece:
    """A contiguous range of blocks that a sequence reads. slots: int32 `[blocks]`. tokens: how many the blocks hold; all blocks
    but the last are full. rotation: the row of angles by which queries are turned back, -1 for none. hidden: uint64 `[blocks,
    words]`, bit t % 64 of word t // 64 of a block for its token t. key: pieces of several sequences with the same key are read
    once."""

    slots: Ints
    tokens: int
    rotation: int = -1
    hidden: npt.NDArray[np.uint64] | None = None
    key: Hashable | None = None


@dataclass(frozen=True)
class Launch:
    """Programs [start, start + programs) of a batch, whose tiles have `rows` query rows."""

    rows: int
    start: int
    programs: int


@dataclass(frozen=True)
class Division:
    """How pieces are divided among programs. An item is a piece with up to a tile's rows of its sequences, the item's members.

    programs: int32 `[programs, PROGRAM_INTS]`. members: int32 `[members, 2]`, a sequence, and the first of its partial states
    that the item makes. states: int32 `[sequences, 2]`, a sequence's first partial state, and how many it has.
    """

    launches: list[Launch]
    programs: Ints
    members: Ints
    states: Ints


class PartialBuffer:
    """Memory for partial states, which batches that run one after the other on one stream may share."""

    def __init__(self, device: torch.device) -> None:
        self._floats = torch.empty(0, dtype=torch.float32, device=device)

    def take(self, floats: int) -> torch.Tensor:
        """A tensor float32 `[floats]`. Tensors that were taken before stay valid, but may be the same memory."""
        if self._floats.numel() < floats:
            self._floats = torch.empty(floats, dtype=torch.float32, device=self._floats.device)
        return self._floats[:floats]


class Batch:
    """Sequences that one call of `decode` answers. All tensors are on the device, and the grid of a launch depends on none of
    them, so that a CUDA graph can replay it while tokens, slots and queries change.

    table: int32, the slots of all pieces. lengths: int32 `[pieces]`, their tokens; the last pieces of the sequences come first.
    pieces: int32 `[pieces, 4]`, where a piece begins in the table, its rotation, where its hidden words begin, -1 for none, and
    padding. hidden: int64 words. programs, members, states: see `Division`. counters: int32 `[sequences, kv_heads]`, how many
    partial states are done; 0 before and after a call. cos, sin: float32 `[rotations, pairs]`. partial: float32 `[rows,
    head_dim]`, tops, totals: float32 `[rows]`, the partial states, each with a row for every query head.
    """

    table: torch.Tensor
    lengths: torch.Tensor
    pieces: torch.Tensor
    hidden: torch.Tensor
    programs: torch.Tensor
    members: torch.Tensor
    states: torch.Tensor

    def __init__(
        self,
        sequences: Sequence[Sequence[Piece]],
        group: int,
        device: torch.device,
        angles: Angles | None = None,
        *,
        layout: SlotLayout,
        interleaved: bool = False,
        room: int = 0,
        workspace: PartialBuffer | None = None,
        split_tokens: int | None = None,
    ) -> None:
        """group: query heads of a KV head. angles: cos and sin, float32 `[rotations, pairs]`, which `Piece.rotation` numbers.
        room: blocks that may be added to the last piece of each sequence. split_tokens: that a program reads; None: as suits the
        device.

        Raises ValueError where pieces hold more tokens than their slots, or have a rotation without angles.
        """
        if not 1 <= group <= TILE_ROWS[-1]:
            raise ValueError(f"{group} query heads of a KV head; expected 1 to {TILE_ROWS[-1]}")
        self.layout, self.group, self.device, self.sequences = layout, group, device, len(sequences)
        self.interleaved = interleaved
        self.pairs = 0 if angles is None else int(angles[0].shape[1])
        pieces, readers = _distinct(sequences)
        for piece in pieces:
            _check(piece, layout, 0 if angles is None else len(angles[0]))
        self._last = [next(p for p, who in enumerate(readers) if i in who) for i in range(len(sequences))]
        self._shared = [len(who) > 1 for who in readers]
        rooms = [room if p in set(self._last) else 0 for p in range(len(pieces))]
        tokens = [piece.tokens + more * layout.block_size for piece, more in zip(pieces, rooms, strict=True)]
        splitting = even_splits(layout.kv_heads, multiprocessors(device)) if split_tokens is None else lambda *_: split_tokens
        division = _divide(tokens, readers, len(sequences), group, splitting)
        self.launches = division.launches
        self.tokens_max = sum(tokens)
        self._put(pieces, rooms, division)
        self.counters = torch.zeros((len(sequences), layout.kv_heads), dtype=torch.int32, device=device)
        none = np.zeros((1, 1), np.float32)
        self.cos, self.sin = (torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in angles or (none, none))
        # Whole cache lines, so that all areas have the alignment that kernels are compiled for.
        rows = -(-layout.kv_heads * group * int(division.states[:, 1].sum()) // 32) * 32
        if rows * layout.head_dim >= 1 << 31:
            raise ValueError(f"{rows} partial states of {layout.head_dim} dimensions; make it several batches")
        floats = (workspace or PartialBuffer(device)).take(rows * (layout.head_dim + 2))
        self.partial, self.tops, self.totals = floats.split([rows * layout.head_dim, rows, rows])

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that it holds on the device."""
        tables = self.table, self.lengths, self.pieces, self.hidden, self.programs, self.members, self.states
        return *tables, self.counters, self.cos, self.sin, self.partial, self.tops, self.totals

    @property
    def tails(self) -> torch.Tensor:
        """Tokens of the last piece of each sequence, int32 `[sequences]`, to be changed in place, up to what its slots hold.

        Raises ValueError where sequences share a last piece.
        """
        for sequence in range(self.sequences):
            self._own(sequence)
        return self.lengths[: self.sequences]

    def set_tails(self, tokens: Ints) -> None:
        """Set the tokens of the last piece of every sequence, int32 `[sequences]`, in one copy. Raises ValueError where slots do
        not hold so many, or a last piece is shared."""
        capacities = np.array([self._blocks[self._own(i)] for i in range(self.sequences)]) * self.layout.block_size
        if tokens.shape != (self.sequences,) or (tokens < 0).any() or (tokens > capacities).any():
            raise ValueError(f"{tokens.tolist()} tokens in pieces whose slots hold {capacities.tolist()}")
        self.tails.copy_(torch.from_numpy(np.ascontiguousarray(tokens, np.int32)), non_blocking=True)

    def set_slots(self, sequence: int, slots: Ints) -> None:
        """Set all slots of the sequence's last piece. Raises ValueError where there is no room for them, or the piece is
        shared."""
        piece = self._own(sequence)
        begin, end = self._begins[piece : piece + 2]
        if len(slots) > end - begin:
            raise ValueError(f"{len(slots)} slots for a piece that has room for {end - begin}")
        self.table[begin : begin + len(slots)].copy_(torch.from_numpy(np.ascontiguousarray(slots, np.int32)), non_blocking=True)
        self._blocks[piece] = len(slots)

    def last_slots(self, sequence: int) -> torch.Tensor:
        """The slots of the sequence's last piece in `table`, and the room behind them, int32. Raises ValueError where it is
        shared."""
        piece = self._own(sequence)
        return self.table[self._begins[piece] : self._begins[piece + 1]]

    def _own(self, sequence: int) -> int:
        piece = self._last[sequence]
        if self._shared[piece]:
            raise ValueError(f"the last piece of sequence {sequence} is shared with others; give each a piece of its own")
        return piece

    def _put(self, pieces: list[Piece], rooms: list[int], division: Division) -> None:
        """Copy the tables to the device, in two copies."""
        self._blocks = [len(piece.slots) for piece in pieces]
        self._begins = [0, *np.cumsum(np.add(self._blocks, rooms)).tolist()]
        table = np.zeros(self._begins[-1], np.int32)
        rows = np.full((len(pieces), 4), -1, np.int32)
        words: list[npt.NDArray[np.uint64]] = [np.zeros(1, np.uint64)]
        for p, piece in enumerate(pieces):
            table[self._begins[p] :][: len(piece.slots)] = piece.slots
            rows[p, :2] = self._begins[p], piece.rotation
            if piece.hidden is not None:
                rows[p, 2] = sum(map(len, words))
                words.append(piece.hidden.reshape(-1))
        self.any_hidden = len(words) > 1
        self.hidden = torch.from_numpy(np.concatenate(words).view(np.int64)).to(self.device)
        lengths = np.array([piece.tokens for piece in pieces], np.int32)
        parts = {"table": table, "lengths": lengths, "pieces": rows}
        parts |= {"programs": division.programs, "members": division.members, "states": division.states}
        begins = np.cumsum([0, *(-(-part.size // 32) * 32 for part in parts.values())])
        packed = np.zeros(int(begins[-1]), np.int32)
        for begin, part in zip(begins, parts.values(), strict=False):
            packed[begin : begin + part.size] = part.reshape(-1)
        device = torch.from_numpy(packed).to(self.device)
        for begin, (name, part) in zip(begins, parts.items(), strict=False):
            setattr(self, name, device[begin : begin + part.size].view(part.shape))


def _distinct(sequences: Sequence[Sequence[Piece]]) -> tuple[list[Piece], list[list[int]]]:
    """Every piece once, with the numbers of the sequences that read it. The last pieces of the sequences come first."""
    distinct: dict[Hashable, tuple[Piece, list[int]]] = {}
    order = [(i, len(pieces) - 1) for i, pieces in enumerate(sequences)]
    order += [(i, p) for i, pieces in enumerate(sequences) for p in range(len(pieces) - 1)]
    for i, p in order:
        piece = sequences[i][p] if p >= 0 else Piece(np.zeros(0, np.int32), 0)
        key = ("of", i, p) if piece.key is None else ("shared", piece.key)
        distinct.setdefault(key, (piece, []))[1].append(i)
    return [piece for piece, _ in distinct.values()], [who for _, who in distinct.values()]


def _check(piece: Piece, layout: SlotLayout, rotations: int) -> None:
    blocks, words = len(piece.slots), -(-layout.block_size // 64)
    if not 0 <= piece.tokens <= blocks * layout.block_size:
        raise ValueError(f"{piece.tokens} tokens in {blocks} blocks of {layout.block_size}")
    if not -1 <= piece.rotation < rotations:
        raise ValueError(f"rotation {piece.rotation}, but there are angles of {rotations}")
    if piece.hidden is not None and (piece.hidden.shape != (blocks, words) or piece.hidden.dtype != np.uint64):
        raise ValueError(f"hidden is {piece.hidden.dtype} {piece.hidden.shape}; expected uint64 ({blocks}, {words})")


def _divide(tokens: list[int], readers: list[list[int]], sequences: int, group: int, split_tokens: SplitTokens) -> Division:
    """Divide pieces among programs. tokens: of every piece. readers: the sequences of every piece."""
    widest = TILE_ROWS[-1] // group
    items = [(p, who[i : i + widest]) for p, who in enumerate(readers) for i in range(0, len(who), widest)]
    used = [0] * sequences
    launches: list[Launch] = []
    programs: list[tuple[int, ...]] = []
    members: list[tuple[int, int]] = []
    least = 0
    for rows in TILE_ROWS:
        # The longest first: what is left at the end is short.
        alike = sorted((item for item in items if least < len(item[1]) * group <= rows), key=lambda item: -tokens[item[0]])
        least = rows
        each = split_tokens(rows, [tokens[p] for p, _ in alike])
        start = len(programs)
        for p, who in alike:
            splits = max(1, -(-tokens[p] // each))
            programs += [(p, split, splits, len(members), len(who), 0, 0, 0) for split in range(splits)]
            for sequence in who:
                members.append((sequence, used[sequence]))
                used[sequence] += splits
        if len(programs) > start:
            launches.append(Launch(rows, start, len(programs) - start))
    begins = np.cumsum([0, *used])
    firsts = [(sequence, int(begins[sequence]) + offset) for sequence, offset in members]
    states = np.stack([begins[:-1], used], axis=1).astype(np.int32)
    return Division(launches, _ints(programs, PROGRAM_INTS), _ints(firsts, 2), states)


def _ints(rows: Sequence[tuple[int, ...]], columns: int) -> Ints:
    return np.array(rows, np.int32).reshape(-1, columns)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a card; 1 for the interpreter."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def even_splits(kv_heads: int, processors: int) -> SplitTokens:
    """Splits that keep all multiprocessors busy to the end. All programs start at once: one that had to wait would double the
    time."""

    def each(rows: int, tokens: list[int]) -> int:
        programs = max(len(tokens), processors * (NARROW_PROGRAMS if rows == TILE_ROWS[0] else 1) // kv_heads)
        longest = SPLIT_TOKENS_MAX if rows == TILE_ROWS[0] else max(tokens, default=1)
        split = SPLIT_TOKENS_MIN
        while split < longest and sum(max(1, -(-n // split)) for n in tokens) > programs:
            split += max(64, split // 32 // 64 * 64)
        return split

    return each
