"""Memory that lies between the launches of a step. Steps follow one another on one stream, so they share it."""

from threading import Lock
from weakref import WeakValueDictionary

from kvdb.attention.triton.batch import Workspace as Partial
from kvdb.attention.triton.coarse import CoarseWorkspace
from kvdb.attention.triton.workspace import Workspace
from kvdb.gpu.device import Device
from kvdb.storage.slot import SlotLayout

Shape = tuple[SlotLayout, int, int, int]
"""A layout, sequences, query heads, and tokens of the longest."""


class Scratch:
    """Work space on a device, for steps on its query stream; what no step uses any more is freed. Thread-safe.

    partial: of what is read whole, as large as the largest step needed.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.partial = Partial(device.torch)
        self._codes: WeakValueDictionary[Shape, Workspace] = WeakValueDictionary()
        self._bounds: WeakValueDictionary[tuple[Shape, int], CoarseWorkspace] = WeakValueDictionary()
        self._lock = Lock()

    def codes(self, shape: Shape) -> Workspace:
        """For a search by codes. Inside `at_work`."""
        shape = _rounded(shape)
        with self._lock:
            made = self._codes.get(shape)
            if made is None:
                self._codes[shape] = made = Workspace.of(*shape, self._device.torch)
            return made

    def bounds(self, shape: Shape, k_pages: int) -> CoarseWorkspace:
        """For a search of so many pages by bounds. Inside `at_work`."""
        shape = _rounded(shape)
        k_pages = 1 << (k_pages - 1).bit_length()
        with self._lock:
            made = self._bounds.get((shape, k_pages))
            if made is None:
                self._bounds[shape, k_pages] = made = CoarseWorkspace.of(*shape, k_pages, self._device.torch)
            return made


def _rounded(shape: Shape) -> Shape:
    """For up to twice as many tokens, so that contexts of like lengths share."""
    return *shape[:3], 1 << (shape[3] - 1).bit_length()
