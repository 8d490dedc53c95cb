"""Block tables: logical block number -> physical block."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from math import isfinite

import numpy as np
import numpy.typing as npt

import indexes.blocks as indexable
import kvdb.storage.direct_io as direct_io
from indexes.base import Int64
from kvdb.codecs.base import Rounding
from kvdb.errors import InvalidArgument, NonFiniteError
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.tier import Blocks, Tier
from kvdb.storage.token_scores import TokenScores
from kvdb.types import Addresses, Array

NO_BLOCKS: Blocks = np.zeros(0, np.int64)
NO_ADDRESSES: Addresses = np.zeros(0, np.uint64)
NOTHING: list[npt.NDArray[np.uint8]] = []
"""The memory of `nothing`."""
# size: one noun, a block table


class BlockTable:
    """The blocks of one layer of one segment or tail, `length` tokens long; the last block may be partly filled.

    It takes blocks as tokens come, so that it wastes at most one block, and owns a reference to each. A block that it shares with
    another table is copied before it is written. rounding: what encoding changed of its tokens. scores: those of its tokens,
    which it owns; None for none. searched: whether indexes over its keys are of use. unseen: how many tokens at its beginning no
    query sees any more: whole blocks of them take no memory, and all are read as zeros.
    """

    __slots__ = ("_addresses", "_blocks", "_count", "layout", "length", "rounding", "scores", "searched", "tier", "unseen")

    def __init__(self, tier: Tier, layout: BlockLayout, *, searched: bool = True) -> None:
        self.tier = tier
        self.layout = layout
        self.searched = searched
        self.unseen = 0
        self.length = 0
        self.rounding = Rounding.of_all(())
        self.scores: TokenScores | None = None
        self._count = 0
        self._blocks: Blocks = NO_BLOCKS
        self._addresses: Addresses = NO_ADDRESSES

    @property
    def skipped(self) -> int:
        """How many blocks at its beginning take no memory."""
        return self.unseen // self.layout.block_size

    @property
    def blocks(self) -> Blocks:
        """The physical blocks that it owns a reference to, those that are skipped left out."""
        return self._blocks[self.skipped : self._count]

    @property
    def addresses(self) -> Addresses:
        """uint64, where the blocks lie."""
        return self._addresses[: self._count]

    @property
    def tagged(self) -> Addresses:
        """The addresses as the kernels of attention take them, with the format of the blocks."""
        return self.addresses | self.layout.tag if self.layout.tag else self.addresses

    @property
    def nbytes(self) -> int:
        return (self._count - self.skipped) * self.layout.nbytes

    @property
    def filled_nbytes(self) -> int:
        """The bytes of blocks that hold tokens; `nbytes` counts those too that were taken ahead."""
        return (self.layout.blocks_for(self.length) - self.skipped) * self.layout.nbytes

    def append(self, k: Array, v: Array | None) -> None:
        """Add n tokens, k `[kv_heads, n, head_dim]` and v `[kv_heads, n, value_dim]`, None where blocks have no V plane.

        Raises NonFiniteError or CapacityError, and then the table is as it was.
        """
        start, count = self.length, self._count
        self._copy_shared_last(evict=True)
        self._allocate(self.layout.blocks_for(start + k.shape[1]) - count, evict=True)
        bad = self.layout.write(self.addresses, start, k, v)
        if bad is not None:
            self._release_behind(count)
            raise NonFiniteError(
                f"{bad.what} of KV head {bad.head}, token {bad.token} of those given, hold NaN or infinity; "
                "expected finite numbers, so find where the model produced them"
            )
        self.length = start + k.shape[1]

    @property
    def room(self) -> int:
        """How many more tokens its blocks have room for."""
        return self._count * self.layout.block_size - self.length

    def reserve_ahead(self, blocks: int) -> None:
        """Take blocks for tokens to come, which `append` or native code writes, and `trim` gives back. No context goes to make
        room. Raises CapacityError."""
        self._allocate(blocks, evict=False)

    def trim(self) -> None:
        """Give the blocks back that hold no token yet."""
        self._release_behind(self.layout.blocks_for(self.length))

    def truncate(self, length: int) -> None:
        """Forget the tokens behind the first `length`, and give their blocks back."""
        assert not length or self.unseen <= length <= self.length
        self._release_behind(self.layout.blocks_for(length))
        self.length, self.unseen = length, min(length, self.unseen)

    def reserve(self, n: int, unseen: int = 0) -> None:
        """Take blocks for n tokens, which the caller will write, but for blocks of the first so many alone; the table has to be
        empty. No context goes to make room. Raises CapacityError."""
        assert not self.length
        with ExitStack() as undo:
            undo.callback(self.release)
            self._begin_unseen(unseen)
            self._allocate(self.layout.blocks_for(n) - self.skipped, evict=False)
            undo.pop_all()
        self.length = n

    def skip(self, n: int, k: Array | None = None, v: Array | None = None) -> None:
        """Count n more tokens, which no query will see, and neither those before them, whose blocks are given back; then `append`
        k and v, where these are given. Raises what `append` raises, and then the table is as it was."""
        unseen, fresh = self.length + n, self.empty()
        with ExitStack() as undo:
            undo.callback(fresh.release)
            fresh._begin_unseen(unseen)
            fresh.length = fresh.skipped * self.layout.block_size
            if fresh.length < unseen:
                fresh.append(*self.layout.zeros(unseen - fresh.length))
            if k is not None:
                fresh.append(k, v)
            undo.pop_all()
        self._release_behind(0)
        self._blocks, self._addresses, self._count = fresh._blocks, fresh._addresses, fresh._count
        self.length, self.unseen = fresh.length, unseen

    def move_to(self, tier: Tier) -> None:
        """Take blocks of another tier from now on; the table has to be empty."""
        assert not self._count
        self.tier = tier

    def read(self, start: int, n: int) -> tuple[Array, Array]:
        """k and v of tokens [start, start + n), as `BlockLayout.read` gives them."""
        assert start >= 0
        assert start + n <= self.length
        return self.layout.read(self.addresses, start, n)

    def encoded(self, tier: Tier, layout: BlockLayout) -> "BlockTable":
        """A table of the same tokens in the format of `layout`, with blocks of `tier`; its own are plain. Raises CapacityError,
        and InvalidArgument for numbers that are too large for the format."""
        twin = BlockTable(tier, layout, searched=self.searched)
        with ExitStack() as undo:
            undo.callback(twin.release)
            twin.reserve(self.length, self.unseen)
            kept, gone = np.s_[self.skipped :], self.skipped * layout.block_size
            twin.rounding = layout.encode(self.addresses[kept], self.length - gone, twin.addresses[kept])
            if not all(map(isfinite, twin.rounding)):
                raise InvalidArgument(
                    f"keys or values are too large for the format {layout.format!r}; expected them to be below 1e36, "
                    'or store them with format=""'
                )
            undo.pop_all()
        return twin

    def keys(self, tokens: int) -> indexable.Blocks:
        """The first `tokens` tokens as indexes read them, with the format of the blocks in their addresses; valid as long as the
        table holds its blocks."""
        layout = self.layout
        addresses = self.tagged[: layout.blocks_for(tokens)].copy()
        return indexable.Blocks(
            layout.dtype,
            layout.kv_heads,
            layout.head_dim,
            layout.block_size,
            addresses,
            tokens,
            value_dim=layout.value_dim,
            values_in_keys=layout.values_in_keys,
        )

    def empty(self) -> "BlockTable":
        """Another table like it, without tokens."""
        return BlockTable(self.tier, self.layout, searched=self.searched)

    def share(self) -> "BlockTable":
        """Another table over the same blocks; a shared block is copied by the table that writes it first."""
        twin = self.empty()
        self.tier.retain(self.blocks)
        twin.length, twin._count, twin.unseen = self.length, self._count, self.unseen
        twin._blocks, twin._addresses = self._blocks.copy(), self._addresses.copy()
        return twin

    def suffix(self, start: int) -> "BlockTable":
        """A table of the tokens [start, length). It shares the blocks if it begins with one, and copies the tokens if not. Raises
        CapacityError."""
        if not start:
            return self.share()
        rest = self.empty()
        rest.extend(self, start, self.length, evict=True)
        return rest

    def extend(self, source: "BlockTable", start: int, stop: int, *, evict: bool = False) -> None:
        """Add the tokens [start, stop) of another table of the same tier. Blocks are shared where they begin in both, and the
        tokens are copied where not. evict: as in `Tier.allocate`. Raises CapacityError, and then the table is as it was."""
        size = self.layout.block_size
        if (unseen := min(source.unseen, stop) - start) > 0:
            self.skip(unseen)
            start += unseen
        n = stop - start
        if n <= 0:
            return
        if self.length % size == 0 and start % size == 0:
            self._share_blocks(source, start // size, self.layout.blocks_for(stop))
        else:
            count = self._count
            self._copy_shared_last(evict=evict)
            self._allocate(self.layout.blocks_for(self.length + n) - count, evict=evict)
            self.layout.copy(source.addresses, start, self.addresses, self.length, n)
        self.length += n

    def picked(self, rows: Int64) -> "BlockTable":
        """A table of these tokens, int64 `[n]`, ascending. It shares the blocks up to the first token that is left out, and holds
        a copy of what stands behind. Raises CapacityError."""
        together = int((rows == np.arange(len(rows))).sum())  # ascending: the first rows, up to the first that is left out
        twin = self.share()
        twin.truncate(together)
        if together < len(rows):
            with ExitStack() as undo:
                undo.callback(twin.release)
                twin.append(*self.layout.read_at(self.addresses, rows[together:]))
                undo.pop_all()
        return twin

    def release(self) -> None:
        """Give every block back, and forget the scores; the table is empty afterwards."""
        if self.scores is not None:
            self.scores.release()
            self.scores = None
        self._release_behind(0)
        self.length = self.unseen = 0

    def _copy_shared_last(self, *, evict: bool) -> None:
        """Copy the last block if tokens are to be written into it and another table shares it."""
        filled = self.length % self.layout.block_size
        if not filled or not self.tier.shared(int(self._blocks[self._count - 1])):
            return
        last = slice(self._count - 1, self._count)
        fresh = self.tier.allocate(1, evict=evict)
        addresses = self.tier.addresses(fresh)
        self.layout.copy(self._addresses[last], 0, addresses, 0, filled)
        self.tier.release(self._blocks[last].copy())
        self._blocks[last], self._addresses[last] = fresh, addresses

    def _share_blocks(self, source: "BlockTable", first: int, last: int) -> None:
        """Add the blocks [first, last) of another table, which it owns as well."""
        blocks = source._blocks[first:last].copy()
        self.tier.retain(blocks)
        self._add(blocks)

    def _begin_unseen(self, tokens: int) -> None:
        """Begin with so many tokens that no query sees."""
        assert not self._count
        self.unseen = tokens
        self._count = self.skipped
        self._blocks = np.full(self._count, -1, np.int64)
        self._addresses = np.full(self._count, nothing(self.layout.nbytes) if tokens else 0, np.uint64)

    def _allocate(self, more: int, *, evict: bool) -> None:
        if more > 0:
            self._add(self.tier.allocate(more, evict=evict))

    def _add(self, blocks: Blocks) -> None:
        """Add blocks, of which the table owns a reference."""
        count = self._count + len(blocks)
        if count > len(self._blocks):
            capacity = max(count, 2 * len(self._blocks))
            self._blocks = np.concatenate([self._blocks[: self._count], np.empty(capacity - self._count, np.int64)])
            self._addresses = np.concatenate([self.addresses, np.empty(capacity - self._count, np.uint64)])
        self._blocks[self._count : count] = blocks
        self._addresses[self._count : count] = self.tier.addresses(blocks)
        self._count = count

    def _release_behind(self, count: int) -> None:
        if count < self._count:
            self.tier.release(self._blocks[max(count, self.skipped) : self._count].copy())
            self._count = count
            self.unseen = min(self.unseen, count * self.layout.block_size)


@cache
def nothing(nbytes: int) -> int:
    """The address of a block of so many zeros, which nobody writes. Pages that are only read take no memory."""
    NOTHING.append(direct_io.page_aligned(nbytes))
    return int(NOTHING[-1].ctypes.data)


def reserve_together(tables: Sequence[BlockTable], n: int, unseen: Sequence[int] = ()) -> None:
    """Take blocks for n tokens in each of these empty tables, which the caller will write. unseen: as in `BlockTable.reserve`, of
    each; none without any. No context goes to make room. Raises CapacityError, and then no block of a tier that lacks room was
    taken at any time, so that nobody else lacked it."""
    assert not any(table.length for table in tables)
    with ExitStack() as undo:
        for table, gone in zip(tables, unseen, strict=bool(unseen)):
            undo.callback(table.release)
            table._begin_unseen(gone)
        for tier in dict.fromkeys(table.tier for table in tables):
            own = [table for table in tables if table.tier is tier]
            counts = [table.layout.blocks_for(n) - table.skipped for table in own]
            blocks = tier.allocate(sum(counts))
            for table, some in zip(own, np.split(blocks, np.cumsum(counts)[:-1]), strict=True):
                undo.callback(table.release)
                table._add(some)
                table.length = n
        undo.pop_all()
