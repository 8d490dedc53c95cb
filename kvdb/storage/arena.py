"""Memory from the operating system, in huge pages where it gives them."""

import mmap

import numpy as np

HUGE_PAGE = 2 << 20


class Arena:
    """`nbytes` of zeroed private memory, which takes physical memory as it is first written, and never more than `nbytes`.

    An arena of at least one huge page is aligned to huge pages, and the system is advised to use them for all of it but an
    incomplete one at its end. That end, and smaller arenas, are plain pages, so that writing a few bytes never takes a huge page
    that nobody counts. huge: whether the system took the advice; None for an arena without a whole huge page.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises OSError when the system has no such memory."""
        self.nbytes = nbytes
        whole = nbytes // HUGE_PAGE * HUGE_PAGE
        self._map = mmap.mmap(-1, nbytes + (HUGE_PAGE if whole else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = np.frombuffer(self._map, np.uint8).ctypes.data
        self.address = -(-start // HUGE_PAGE) * HUGE_PAGE if whole else start
        self.huge = _advise_huge(self._map, self.address - start, whole) if whole else None

    def close(self) -> None:
        """Return the memory. Addresses inside are invalid afterwards."""
        self._map.close()


def _advise_huge(memory: mmap.mmap, start: int, nbytes: int) -> bool:
    """Whether the system took the advice: it may lack huge pages, or have them switched off."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
    except OSError:
        return False
    return True
