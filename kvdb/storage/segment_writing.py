"""A segment's file while it is written: under another name, synced to the disk and renamed, so that a file of its own name is
always whole. One that is to outlive the process alone, and not the loss of power, is not synced.

Every offset of the file is known from its contents, so blocks may go to it as they come, in any order of the layers: they are
summed and written in threads of their own while the caller goes on. What is left for the end are the blocks of incomplete pieces,
the head with the sums, and waiting for the disk.
"""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

import kvdb.storage.direct_io as direct_io
from kvdb.errors import CapacityError, Unavailable
from kvdb.storage.block_table import BlockTable
from kvdb.storage.direct_io import DEPTH
from kvdb.storage.segment_file import SegmentFile
from kvdb.storage.segment_head import Contents
from kvdb.types import Addresses

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_threads() -> ThreadPoolExecutor:
    """The threads that write the files of one folder, DEPTH pieces at a time."""
    return ThreadPoolExecutor(DEPTH, "kvdb-write")


class SegmentWriting:
    """A segment's file that is being written, until `finish` or `abandon`. Not thread-safe: its owner takes turns.

    unfinished: its path until it is finished.

    Blocks that it was shown stay where and as they are until then. It keeps no copy of any, so nothing has to wait for the disk
    but the end.
    """

    def __init__(self, path: Path, contents: Contents, threads: Executor, setting: str) -> None:
        """path: of the finished file. setting: the one that says where its folder is. Raises CapacityError where the
        disk is full and Unavailable where it cannot be written; then there is no file."""
        self.path = path
        self.contents = contents
        self._threads = threads
        self._setting = setting
        self.unfinished = path.with_name(f".{path.name}")
        self._sums = np.empty((contents.layers, contents.units), np.uint32)
        self._pieces = [list(reversed(list(contents.pieces()))) for _ in range(contents.layers)]  # those that are still to come
        self._moving: list[Future[None]] = []
        self._file = -1
        try:
            self._file = direct_io.opened(self.unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct=contents.direct)
            direct_io.reserve(self._file, contents.nbytes)
        except OSError as error:
            self.abandon()
            raise self._failed(error) from None

    def take(self, layer: int, table: BlockTable) -> None:
        """Begin to write what is complete of a layer's table. Raises CapacityError or Unavailable where something could not be
        written that was taken before; then only `abandon` is left."""
        self._begin(layer, table, table.length // self.contents.layout.block_size)
        try:
            self._moving = [piece for piece in self._moving if not _is_done(piece)]
        except OSError as error:
            raise self._failed(error) from None

    def finish(self, tables: Sequence[BlockTable], *, synced: bool) -> SegmentFile:
        """Write the rest of these tables, one a layer and each whole, and give the file its name. synced: wait until it has
        reached the disk. Raises CapacityError or Unavailable; then there is no file."""
        contents = self.contents
        assert len(tables) == contents.layers
        assert all(table.length == contents.tokens and table.layout == contents.layout for table in tables)
        try:
            for layer, table in enumerate(tables):
                self._begin(layer, table, contents.blocks)
            for piece in self._moving:
                piece.result()
            self._write_head()
            if synced:
                direct_io.sync(self._file)
            os.rename(self.unfinished, self.path)
        except OSError as error:
            raise self._failed(error) from None
        finally:
            self.abandon()
        file = SegmentFile(self.path, contents, contents.digest(self._sums))
        file.check_head()
        return file

    def abandon(self) -> None:
        """Remove the file, if it has no name yet. When this returns, no block is read any more."""
        for piece in self._moving:
            piece.cancel()
        wait(self._moving)
        self._moving = []
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        with suppress(OSError):
            self.unfinished.unlink(missing_ok=True)

    def _begin(self, layer: int, table: BlockTable, blocks: int) -> None:
        """Begin to write the pieces that stand in the first `blocks` blocks of a layer and were not begun before."""
        coming = self._pieces[layer]
        while coming and coming[-1].stop <= blocks:
            piece = coming.pop()
            addresses = table.addresses[piece].copy()
            last = table.length % table.layout.block_size if piece.stop == self.contents.blocks else 0
            self._submit(partial(self._write, layer, piece, addresses, last))

    def _submit(self, move: Callable[[], None]) -> None:
        try:
            self._moving.append(self._threads.submit(move))
        except RuntimeError:  # the interpreter ends
            move()

    def _write(self, layer: int, piece: slice, addresses: Addresses, last: int) -> None:
        """Write some blocks of a layer and set their checksums. last: the tokens of the last one, if it is the layer's last and
        not full: zeros are written behind them, as tokens of another segment may be left there."""
        contents, layout = self.contents, self.contents.layout
        if last:
            scratch = direct_io.page_aligned(layout.nbytes)
            layout.copy_first(int(addresses[-1]), scratch.ctypes.data, last)
            addresses[-1] = scratch.ctypes.data
        self._sums[layer, contents.units_of(piece)] = contents.checksums(addresses)
        direct_io.write(self._file, contents.layer_at(layer) + piece.start * layout.nbytes, addresses, layout.nbytes)

    def _write_head(self) -> None:
        scratch = direct_io.page_aligned(self.contents.extents_at)
        scratch[:] = np.frombuffer(self.contents.head(self._sums).ljust(len(scratch), b"\0"), np.uint8)
        direct_io.write(self._file, 0, np.array([scratch.ctypes.data], np.uint64), len(scratch))

    def _failed(self, error: OSError) -> CapacityError | Unavailable:
        kept, folder = "everything stays in main memory", self.path.parent
        if error.errno in FULL:
            return CapacityError(
                f"{folder} has no room for a segment of {self.contents.nbytes:,} bytes: {error.strerror}, with "
                f"{shutil.disk_usage(folder).free:,} bytes free on its file system; {kept}, so free some of that disk, drop "
                f"contexts, or let {self._setting} be on another"
            )
        return Unavailable(
            f"{folder} cannot be written to: {error.strerror}; {kept}, so make the folder of {self._setting} a writable one"
        )


def _is_done(piece: Future[None]) -> bool:
    """Whether a piece was written. Raises OSError for one that could not be."""
    if not piece.done():
        return False
    piece.result()
    return True
