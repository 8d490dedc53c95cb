"""Files that are read straight into blocks of memory and written from them, past the page cache where possible."""

import ctypes
import errno
import fcntl
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvdb.types import Addresses

PAGE = 4096
DIRECT = getattr(os, "O_DIRECT", 0)
DEPTH = 8
"""The number of pieces that are read or written at once: a thread that clears, sums or checks the memory of one asks the disk for
nothing meanwhile. Each is a call in a thread, which waits in the system without the GIL."""
Buffer = ctypes.Array[ctypes.c_char]


def opened(path: Path | str, flags: int, *, direct: bool) -> int:
    """The descriptor of a file that was opened; the caller closes it. direct: bypass the page cache, for memory, lengths and
    offsets that are multiples of PAGE; if the file system cannot do that, the file is opened like any other. Raises OSError."""
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    with ExitStack() as undo:
        undo.callback(os.close, file)
        if direct and DIRECT:
            _set_direct(file)
        undo.pop_all()
    return file


@contextmanager
def open_file(path: Path, flags: int, *, direct: bool) -> Iterator[int]:
    """The descriptor of a file that is open while the body runs; see `opened`."""
    file = opened(path, flags, direct=direct)
    try:
        yield file
    finally:
        os.close(file)


def read(file: int, at: int, addresses: Addresses, nbytes: int) -> int:
    """Fill blocks of `nbytes` bytes at these addresses from the file's bytes [at, ...), without the GIL.

    Returns the bytes read, fewer than asked for where the file ends. Raises OSError.
    """
    return _transfer(os.preadv, file, at, buffers(addresses, nbytes))


def write(file: int, at: int, addresses: Addresses, nbytes: int) -> None:
    """Write blocks of `nbytes` bytes to the file's bytes [at, ...), without the GIL. Raises OSError."""
    _transfer(os.pwritev, file, at, buffers(addresses, nbytes))


def at_once(move: Callable[[slice], None], pieces: Iterable[slice]) -> None:
    """Read these pieces, DEPTH of them at a time. Raises what `move` raises, once nothing is under way any more."""
    pieces = list(pieces)
    if len(pieces) == 1:
        move(pieces[0])
        return
    with ThreadPoolExecutor(DEPTH, "kvdb-move") as executor:
        try:
            moving = [executor.submit(move, piece) for piece in pieces]
        except RuntimeError:  # the interpreter ends
            moving = []
            executor.shutdown()
            for piece in pieces:
                move(piece)
        try:
            for one in moving:
                one.result()
        finally:
            executor.shutdown(cancel_futures=True)


def reserve(file: int, nbytes: int) -> None:
    """Make the file `nbytes` long, and reserve room for it where the system can, so that a full disk is found before anything is
    written. Raises OSError."""
    if sys.platform == "linux":
        try:
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise
    os.ftruncate(file, nbytes)


def sync(file: int) -> None:
    """Wait until the file is on the disk, and drop it from the page cache. Raises OSError."""
    os.fsync(file)
    if sys.platform == "linux":
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def page_aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory that begins on a page."""
    memory = np.zeros(nbytes + PAGE, np.uint8)
    at = -memory.ctypes.data % PAGE
    return memory[at : at + nbytes]


def _set_direct(file: int) -> None:
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _transfer(call: Callable[[int, list[Buffer], int], int], file: int, at: int, buffers: list[Buffer]) -> int:
    """Read or write all of the buffers, unless the file ends; the bytes transferred."""
    start = at
    while buffers:
        try:
            done = call(file, buffers, at)
        except OSError as error:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & DIRECT:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~DIRECT)  # a file system that wants other multiples than PAGE
            continue
        if not done:
            break
        at += done
        buffers = _remaining(buffers, done)
    return at - start


def buffers(addresses: Addresses, nbytes: int) -> list[Buffer]:
    """The memory of the blocks; neighbours are one buffer."""
    ends = np.flatnonzero(np.diff(addresses) != nbytes) + 1 if len(addresses) > 1 else addresses[:0]
    bounds = [0, *ends.tolist(), len(addresses)]
    return [(ctypes.c_char * ((end - first) * nbytes)).from_address(int(addresses[first])) for first, end in pairwise(bounds)]


def _remaining(buffers: list[Buffer], done: int) -> list[Buffer]:
    """The buffers without their first `done` bytes."""
    rest = []
    for buffer in buffers:
        size = len(buffer)
        if done < size:
            rest.append((ctypes.c_char * (size - done)).from_buffer(buffer, done))
        done = max(0, done - size)
    return rest
