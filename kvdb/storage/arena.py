"""Memory from the operating system, in huge pages where it gives them."""

import mmap

import numpy as np

HUGE_PAGE = 2 << 20


class Arena:
    """`nbytes` of zeroed private memory, aligned to a huge page. Physical memory is taken as it is first written."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.huge = _advise_huge(self._map)
        start = np.frombuffer(self._map, np.uint8).ctypes.data
        self.address = -(-start // HUGE_PAGE) * HUGE_PAGE

    def close(self) -> None:
        """Return the memory. Addresses inside are invalid afterwards."""
        self._map.close()


def _advise_huge(memory: mmap.mmap) -> bool:
    """Whether the system took the advice: it may lack huge pages, or have them switched off."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return False
    return True
