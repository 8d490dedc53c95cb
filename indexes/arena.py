"""Memory from the operating system, in huge pages where it gives them."""

import mmap
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from indexes import _native
from indexes.file import Shapes

HUGE_PAGE = 2 << 20
LINE = 64
"""The bytes of a cache line, at whose borders arrays begin."""


class Arena:
    """`nbytes` of zeroed private memory, which takes physical memory as it is first written, and never more than `nbytes`.

    An arena of at least one huge page is aligned to huge pages, and the system is advised to use them for all of it but an
    incomplete one at its end. That end, and smaller arenas, are plain pages, so that writing a few bytes never takes a huge page
    that nobody counts. On a machine with several memory nodes its pages come from all of them in turns, so that whatever reads it
    has the bandwidth of all. huge: whether the system took the advice; None for an arena without a whole huge page.
    """

    def __init__(self, nbytes: int, *, plain: bool = False) -> None:
        """plain: of plain pages alone, for memory whose pages come and go one by one. Raises OSError when the system has no such
        memory."""
        self.nbytes = nbytes
        whole = 0 if plain else nbytes // HUGE_PAGE * HUGE_PAGE
        self._map = mmap.mmap(-1, nbytes + (HUGE_PAGE if whole else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = np.frombuffer(self._map, np.uint8).ctypes.data
        self.address = -(-start // HUGE_PAGE) * HUGE_PAGE if whole else start
        self.huge = _advise_huge(self._map, self.address - start, whole) if whole else None
        if plain and hasattr(mmap, "MADV_NOHUGEPAGE"):
            with suppress(OSError):  # a system without huge pages
                self._map.madvise(mmap.MADV_NOHUGEPAGE)
        _native.interleave(self.address, nbytes)

    def bytes(self) -> npt.NDArray[np.uint8]:
        """All of it, uint8 `[nbytes]`. Whoever holds the array keeps the memory, and then it cannot be closed."""
        everything = np.frombuffer(self._map, np.uint8)
        begin = self.address - everything.ctypes.data
        return everything[begin : begin + self.nbytes]

    def close(self) -> None:
        """Return the memory. Addresses inside are invalid afterwards."""
        self._map.close()


def arrays_together(shapes: Shapes) -> dict[str, npt.NDArray[Any]]:
    """Zeroed arrays side by side in one arena, which takes `nbytes_together(shapes)` bytes.

    A search reads all of them; from plain pages that took it up to half as long again, because every page had to be looked up.
    """
    memory, at, arrays = Arena(max(nbytes_together(shapes), LINE)).bytes(), 0, {}
    for name, (shape, dtype) in shapes.items():
        nbytes = _nbytes(shape, dtype)
        arrays[name] = memory[at : at + nbytes].view(dtype).reshape(shape)
        at += -(-nbytes // LINE) * LINE
    return arrays


def nbytes_together(shapes: Shapes) -> int:
    """The bytes of an arena for these arrays: in whole huge pages where that takes no more than a third in addition."""
    nbytes = sum(-(-_nbytes(shape, dtype) // LINE) * LINE for shape, dtype in shapes.values())
    rest = -nbytes % HUGE_PAGE
    return nbytes + rest if 3 * rest <= nbytes else nbytes


def _nbytes(shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
    return prod(shape) * np.dtype(dtype).itemsize


def _advise_huge(memory: mmap.mmap, start: int, nbytes: int) -> bool:
    """Whether the system took the advice: it may lack huge pages, or have them switched off."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
    except OSError:
        return False
    return True
