"""A region of memory that a server shares with one client: created sealed, so that nobody can cut it off under the other."""

import fcntl
import math
import mmap
import os
from typing import Any

import numpy as np

import kvdb._native as _native
from kvdb.errors import Unavailable
from kvdb.rpc.shared_records import REGION_BYTES, check_span
from kvdb.types import Array

VIEWS_MAX = 1024
"""How many arrays over the region are kept, since the next step uses the same."""


class SharedRegion:
    """A mapped region, with one end of its rings. descriptor: of the memory; whoever made it closes it."""

    def __init__(self, descriptor: int, *, is_server: bool) -> None:
        """Map it, every page of it in memory. Raises Unavailable for anything but a sealed region of REGION_BYTES."""
        sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        try:
            if os.fstat(descriptor).st_size != REGION_BYTES or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & sealed != sealed:
                raise Unavailable("the server shares memory of another form; expected a sealed region")
            mapped = mmap.mmap(descriptor, REGION_BYTES, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            raise Unavailable(f"memory cannot be shared with the server ({error.strerror})") from None
        self.memory = memoryview(mapped)
        self._bytes = np.frombuffer(mapped, np.uint8)
        self.ring = _native.SharedRing(self._bytes, is_server)
        self._views: dict[tuple[int, tuple[int, ...], np.dtype[Any]], Array] = {}

    def view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The array that lies there, in place. Raises InvalidArgument where it does not lie in the arena."""
        key = offset, shape, dtype
        known = self._views.get(key)
        if known is not None:
            return known
        nbytes = math.prod(shape) * dtype.itemsize
        check_span(offset, nbytes)
        if len(self._views) >= VIEWS_MAX:
            self._views.clear()
        view: Array = self._bytes[offset : offset + nbytes].view(dtype).reshape(shape)
        self._views[key] = view
        return view

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of some bytes of the arena. Raises InvalidArgument."""
        check_span(offset, nbytes)
        return bytes(self.memory[offset : offset + nbytes])

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes into the arena. Raises InvalidArgument."""
        check_span(offset, len(data))
        self.memory[offset : offset + len(data)] = data


def create_region() -> int:
    """The descriptor of a new region, zeros, which can neither shrink nor grow. Raises OSError."""
    descriptor = os.memfd_create("kvdb", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, REGION_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
