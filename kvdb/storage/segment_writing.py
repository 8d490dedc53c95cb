"""A segment while it is written to a store.

Every offset of it is known from its contents, so blocks may go to the store as they come, in any order of the layers: they are
summed and written in threads of their own while the caller goes on. What is left for the end are the blocks of incomplete pieces,
the head with the sums, and waiting for the store.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import partial

import numpy as np

import kvdb.storage.direct_io as direct_io
from kvdb.storage.block_table import BlockTable
from kvdb.storage.direct_io import DEPTH
from kvdb.storage.segment_head import Contents
from kvdb.storage.segment_store import ObjectWriter
from kvdb.types import Addresses


def write_threads() -> ThreadPoolExecutor:
    """The threads that write the segments of one store, DEPTH pieces at a time."""
    return ThreadPoolExecutor(DEPTH, "kvdb-write")


class SegmentWriting:
    """A segment that is being written under a key, until `finish` or `abandon`. Not thread-safe: its owner takes turns.

    Blocks that it was shown stay where and as they are until then. It keeps no copy of any, so nothing has to wait for the store
    but the end.
    """

    def __init__(self, key: str, contents: Contents, writer: ObjectWriter, threads: Executor) -> None:
        """writer: of the object under that key, of `contents.nbytes` bytes; it takes it over."""
        self.key = key
        self.contents = contents
        self._writer = writer
        self._threads = threads
        self._sums = np.empty(contents.units, np.uint32)
        self._pieces = [list(extent.pieces())[::-1] for extent in contents.extents]  # those that are still to come
        self._moving: list[Future[None]] = []

    def take(self, layer: int, table: BlockTable) -> None:
        """Begin to write what is complete of a layer's table. Raises CapacityError or Unavailable where something could not be
        written that was taken before; then only `abandon` is left."""
        self._begin(layer, table, table.length // table.layout.block_size - table.skipped)
        self._moving = [piece for piece in self._moving if not _is_done(piece)]

    def finish(self, tables: Sequence[BlockTable], mark: str, *, synced: bool) -> str:
        """Write the rest of these tables, one a layer and each whole, and have the store keep it. mark, synced: see
        `ObjectWriter.finish`. Returns the digest of its contents. Raises CapacityError or Unavailable; then nothing is kept."""
        contents = self.contents
        assert tuple(table.layout for table in tables) == contents.layouts
        assert unseen_of(tables) == contents.unseen
        assert all(table.length == contents.tokens for table in tables)
        try:
            for layer, table in enumerate(tables):
                self._begin(layer, table, contents.blocks[layer])
            for piece in self._moving:
                piece.result()
            self._write_head()
            self._writer.finish(mark, synced=synced)
        finally:
            self.abandon()
        return contents.digest(self._sums)

    def abandon(self) -> None:
        """Give it up, if it is not finished. When this returns, no block is read any more."""
        for piece in self._moving:
            piece.cancel()
        wait(self._moving)
        self._moving = []
        self._writer.abandon()

    def _begin(self, layer: int, table: BlockTable, blocks: int) -> None:
        """Begin to write the pieces that stand in the first `blocks` blocks of a layer and were not begun before."""
        coming = self._pieces[layer]
        while coming and coming[-1].stop <= blocks:
            piece = coming.pop()
            addresses = table.addresses[table.skipped :][piece].copy()
            last = table.length % table.layout.block_size if piece.stop == self.contents.blocks[layer] else 0
            self._submit(partial(self._write, layer, piece, addresses, last))

    def _submit(self, move: Callable[[], None]) -> None:
        try:
            self._moving.append(self._threads.submit(move))
        except RuntimeError:  # the interpreter ends
            move()

    def _write(self, layer: int, piece: slice, addresses: Addresses, last: int) -> None:
        """Write some blocks of a layer and set their checksums. last: the tokens of the last one, if it is the layer's last and
        not full: zeros are written behind them, as tokens of another segment may be left there."""
        extent = self.contents.extents[layer]
        layout = extent.layout
        if last:
            scratch = direct_io.page_aligned(layout.nbytes)
            layout.copy_first(int(addresses[-1]), scratch.ctypes.data, last)
            addresses[-1] = scratch.ctypes.data
        self._sums[extent.units_of(piece)] = extent.checksums(addresses)
        self._writer.write(extent.at + piece.start * layout.nbytes, addresses, layout.nbytes)

    def _write_head(self) -> None:
        scratch = direct_io.page_aligned(self.contents.extents_at)
        scratch[:] = np.frombuffer(self.contents.head(self._sums).ljust(len(scratch), b"\0"), np.uint8)
        self._writer.write(0, np.array([scratch.ctypes.data], np.uint64), len(scratch))


def unseen_of(tables: Sequence[BlockTable]) -> tuple[int, ...]:
    """`Contents.unseen` of these tables."""
    return tuple(table.unseen for table in tables) if any(table.unseen for table in tables) else ()


def _is_done(piece: Future[None]) -> bool:
    """Whether a piece was written. Raises what writing it raised."""
    if not piece.done():
        return False
    piece.result()
    return True
