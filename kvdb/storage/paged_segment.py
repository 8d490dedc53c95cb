"""Segments whose layers come into main memory when they are read, because not all of them fit."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from kvdb.errors import KvdbError
from kvdb.storage.block_table import BlockTable
from kvdb.storage.next_use import NextUse
from kvdb.storage.segment_file import SegmentFile
from kvdb.storage.tier import Tier


class Pool(Protocol):
    """What keeps paged layers, `kvdb.storage.buffer_pool.BufferPool`."""

    def tier(self, block_nbytes: int) -> Tier:
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

    def unpin(self, layers: "Sequence[PagedLayer]") -> None:
        """Undo one `pin`."""
        ...


class PagedLayer:
    """One layer of a paged segment. Its table has its blocks, at addresses that stay; they hold its tokens while it is resident.

    pins: how often it is pinned. loading: whether it is being read from disk. error: why it was not read when it was last tried.
    """

    def __init__(self, segment: "PagedSegment", number: int) -> None:
        self.segment = segment
        self.number = number
        self.table = segment.tables[number]
        self.nbytes = self.table.nbytes
        self.pins = 0
        self.loading = self.resident = False
        self.error: KvdbError | None = None
        self.use = NextUse()

    @property
    def next(self) -> "PagedLayer":
        """The layer that a decode step asks for behind this one; behind the last comes the first, of the next step."""
        return self.segment.layers[(self.number + 1) % len(self.segment.layers)]

    def read(self) -> None:
        """Fill its blocks from its file. Raises IntegrityError or Unavailable."""
        self.segment.file.read_layer(self.number, self.table)


class PagedSegment:
    """The layers of one segment in a pool, until `Pool.drop`. reserved: the bytes of main memory that nobody else may take of the
    pool, as long as the segment is open."""

    def __init__(self, pool: Pool, file: SegmentFile, tables: Sequence[BlockTable]) -> None:
        """tables: empty ones, which take blocks of the pool's tier from now on. Raises CapacityError, and then they are as they
        were."""
        self._home = tables[0].tier
        with ExitStack() as undo:
            for table in tables:
                undo.callback(table.move_to, self._home)
                undo.callback(table.release)
                table.move_to(pool.tier(table.layout.nbytes))
                table.reserve(file.contents.tokens)
            undo.pop_all()
        self.pool = pool
        self.file = file
        self.tables = tables
        self.layers = [PagedLayer(self, number) for number in range(len(tables))]
        self.reserved = 0
        self._used: PagedLayer | None = None

    @property
    def resident_nbytes(self) -> int:
        """The bytes of its layers in main memory."""
        return sum(layer.nbytes for layer in self.layers if layer.resident)

    def leave(self) -> None:
        """Give the blocks back; the tables are empty afterwards, and take blocks where they took them before."""
        for table in self.tables:
            table.release()
            table.move_to(self._home)

    def note_use(self, layer: PagedLayer, now: int) -> None:
        """Note the use of a layer. Uses one right behind the other, as of an answer and its audit, are one."""
        if layer is not self._used:
            layer.use.used(now)
            self._used = layer


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


def paging_notes(layers: Sequence[PagedLayer]) -> tuple[str, ...]:
    """The line of EXPLAIN about the paged layers that a query reads; none without any."""
    if not layers:
        return ()
    there, nbytes = sum(layer.nbytes for layer in layers if layer.resident), sum(layer.nbytes for layer in layers)
    return (f"Paged: {there:,} of {nbytes:,} bytes are in memory, the rest is read from disk first",)
