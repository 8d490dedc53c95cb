"""Segments whose layers come into main memory when they are read, because not all of them fit."""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil
from threading import Lock
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

import kvdb._native as _native
from indexes.base import Int64
from kvdb.errors import KvdbError
from kvdb.storage.block_table import BlockTable
from kvdb.storage.next_use import NextUse
from kvdb.storage.paged import PagedTier
from kvdb.storage.segment_head import Contents
from kvdb.storage.stored_segment import StoredSegment, read_error
from query_optimizer.explain import milliseconds

T = TypeVar("T")


class Pool(Protocol):
    """What keeps paged layers, `kvdb.storage.buffer_pool.BufferPool`."""

    pages: _native.PagePool
    """Counts what their pages take."""
    share: float
    """The share of the blocks of each layer that stay in memory before all others, where their scores are known."""

    def tier(self, block_nbytes: int) -> PagedTier:
        """The tier for blocks of that size."""
        ...

    def open(self, segment: "PagedSegment") -> None:
        """Reserve room for one layer of a segment. Raises CapacityError where there is none, and Unavailable once closed."""
        ...

    def close(self, segment: "PagedSegment") -> None:
        """Undo `open`. Its layers stay until somebody else needs the room."""
        ...

    def drop(self, segment: "PagedSegment") -> None:
        """Free all blocks of a segment; when this returns, its tables are empty and nothing is written to their blocks."""
        ...

    def pin(self, layers: "Sequence[PagedLayer]") -> None:
        """Bring these layers into memory and keep them there until `unpin`; what is expected next is read ahead meanwhile.

        Waits for memory that other calls have pinned. Raises CapacityError where even that would not be enough, IntegrityError,
        or Unavailable; then none is pinned.
        """
        ...

    def use(self, layers: "Sequence[PagedLayer]") -> None:
        """Keep what is there of these layers, and what native code brings in, in memory until `unpin`. Raises Unavailable, or
        IntegrityError where the segment's head is damaged; then none is pinned."""
        ...

    def unpin(self, layers: "Sequence[PagedLayer]") -> None:
        """Undo one `pin` or `use`."""
        ...


class PagedLayer:
    """One layer of a paged segment. Its table has its blocks, at addresses that stay; of their pages some are in memory.

    pages: None until it is first read. pins: how often it is pinned. loading: whether all of it is being read from disk. error:
    why it was not read when that was last tried.
    """

    def __init__(self, segment: "PagedSegment", number: int) -> None:
        self.segment = segment
        self.number = number
        self.table = segment.tables[number]
        self.pages: _native.LayerPages | None = None
        self.pins = 0
        self.loading = False
        self.error: KvdbError | None = None
        self.use = NextUse()

    @property
    def nbytes(self) -> int:
        """The bytes of all its pages."""
        return self.segment.stored.contents.extents[self.number].nbytes

    @property
    def held_nbytes(self) -> int:
        """The bytes of those that take memory."""
        return 0 if self.pages is None else self.pages.nbytes

    @property
    def preferred_nbytes(self) -> int:
        """The bytes of those of them that stay before all others."""
        return 0 if self.pages is None else self.pages.preferred_nbytes

    @property
    def resident(self) -> bool:
        """Whether all of it is in memory."""
        return self.pages is not None and self.pages.full

    @property
    def next(self) -> "PagedLayer":
        """The layer that a decode step asks for behind this one; behind the last comes the first, of the next step."""
        return self.segment.layers[(self.number + 1) % len(self.segment.layers)]

    def opened(self) -> _native.LayerPages:
        """Its pages, and those of all layers from then on; the segment's head says what they hold. Whoever holds the lock of a
        pool has called this before. Raises IntegrityError or Unavailable."""
        if self.pages is None:
            with self.segment.opening:
                for layer in self.segment.layers:
                    if layer.pages is None:
                        pages = layer.segment.stored.pages(self.segment.pool.pages, layer.number, layer.table)
                        if self.segment.scores is not None:
                            best = best_blocks(self.segment.scores[layer.number], self.segment.pool.share)
                            pages.prefer(units_of(self.segment.stored.contents, layer.number, best))
                        self.segment.tier_of(layer.table).hold(layer.table.blocks, pages)
                        layer.pages = pages
        assert self.pages is not None
        return self.pages

    def read(self) -> None:
        """Read the pages that `LayerPages.take_all` took. Raises IntegrityError or Unavailable."""
        assert self.pages is not None
        try:
            self.pages.read()
        except OSError as error:
            raise read_error(error) from None


class PagedSegment:
    """The layers of one segment in a pool, until `Pool.drop`. reserved: the bytes of main memory that nobody else may take of the
    pool, as long as the segment is open."""

    def __init__(
        self, pool: Pool, stored: StoredSegment, tables: Sequence[BlockTable], scores: npt.NDArray[np.float16] | None = None
    ) -> None:
        """tables: empty ones, which take blocks of the pool's tier from now on. scores: of their blocks, `[layers, blocks]`, None
        where these are not known. Raises CapacityError, and then the tables are as they were."""
        self.pool = pool
        self._homes = [table.tier for table in tables]
        with ExitStack() as undo:
            gone = stored.contents.unseen or len(tables) * (0,)
            for table, home, unseen in zip(tables, self._homes, gone, strict=True):
                undo.callback(table.move_to, home)
                undo.callback(table.release)
                table.move_to(self.tier_of(table))
                table.reserve(stored.contents.tokens, unseen)
            undo.pop_all()
        self.stored = stored
        self.tables = tables
        self.scores = scores
        self.layers = [PagedLayer(self, number) for number in range(len(tables))]
        self.reserved = 0
        self.opening = Lock()
        self._used: PagedLayer | None = None

    @property
    def resident_nbytes(self) -> int:
        """The bytes of its pages in main memory."""
        return sum(layer.held_nbytes for layer in self.layers)

    def tier_of(self, table: BlockTable) -> PagedTier:
        """The pool's tier for blocks of a table's size."""
        return self.pool.tier(table.layout.nbytes)

    def leave(self) -> None:
        """Give the blocks back; the tables are empty afterwards, and take blocks where they took them before."""
        for layer in self.layers:
            layer.pages = None
        for table, home in zip(self.tables, self._homes, strict=True):
            table.release()
            table.move_to(home)

    def note_use(self, layer: PagedLayer, now: int) -> None:
        """Note the use of a layer. Uses one right behind the other, as of an answer and its audit, are one."""
        if layer is not self._used:
            layer.use.used(now)
            self._used = layer


def best_blocks(scores: npt.NDArray[np.float16], share: float) -> Int64:
    """The blocks with the best of these scores, int64: the share of them, rounded up. Of equal ones the first is better."""
    return np.argsort(-scores, kind="stable")[: ceil(share * len(scores))]


def units_of(contents: Contents, layer: int, blocks: Int64) -> npt.NDArray[np.int32]:
    """The units of a layer that hold these blocks alone, int32; none where a unit holds several blocks."""
    extent = contents.extents[layer]
    each = extent.layout.nbytes // extent.unit_nbytes if contents.direct else 0
    return (each * blocks[:, None] + np.arange(each)).reshape(-1).astype(np.int32)


@contextmanager
def pinned(layers: Sequence[PagedLayer]) -> Iterator[None]:
    """Keep layers in memory while the body runs; the same one may stand there twice. Raises what `Pool.pin` raises."""
    if not layers:
        yield
        return
    pool, once = layers[0].segment.pool, list(dict.fromkeys(layers))
    pool.pin(once)
    try:
        yield
    finally:
        pool.unpin(once)


def reading(layers: Sequence[PagedLayer], answer: Callable[[], T], *, whole: bool) -> T:
    """What `answer` returns, with these layers in memory: all of them, or else only the pages that native code asks for, unless
    these find no room. Raises what `answer` and `Pool.pin` raise."""
    if layers and not whole and all(layer.table.layout.codec.has_rows for layer in layers):
        pool = layers[0].segment.pool
        pool.use(layers)
        try:
            return answer()
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise read_error(error) from None
        finally:
            pool.unpin(layers)
    with pinned(layers):
        return answer()


@dataclass(frozen=True, slots=True)
class PageReads:
    """What searches had read from disk. pages: how many. batches: in how many reads of several at a time. seconds: how long they
    waited for these and for what others were reading, the sum over the threads that waited."""

    pages: int
    batches: int
    seconds: float

    @classmethod
    def so_far(cls, layers: Sequence[PagedLayer]) -> Self:
        """Those of all searches of these layers since they were opened."""
        counts = [layer.pages.waits for layer in layers if layer.pages is not None]
        return cls(sum(one[0] for one in counts), sum(one[1] for one in counts), sum(one[2] for one in counts))

    def __sub__(self, other: "PageReads") -> "PageReads":
        return PageReads(self.pages - other.pages, self.batches - other.batches, self.seconds - other.seconds)

    def __str__(self) -> str:
        waited = milliseconds(self.seconds)
        return f"Pages Read: {self.pages:,} in {self.batches:,} batches by the last search, which waited {waited}"


def paging_notes(layers: Sequence[PagedLayer], last: PageReads | None) -> tuple[str, ...]:
    """The lines of EXPLAIN about the paged layers that a query reads; none without any. last: what the last search read of them,
    None before the first."""
    if not layers:
        return ()
    there, nbytes = sum(layer.held_nbytes for layer in layers), sum(layer.nbytes for layer in layers)
    paged = f"Paged: {there:,} of {nbytes:,} bytes are in memory, the rest is read from disk as far as it is asked for"
    return (paged,) if last is None else (paged, str(last))
