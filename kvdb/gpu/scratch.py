"""Memory that a step uses between its launches. Steps follow one another on one stream, so they share it."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import TypeVar
from weakref import WeakValueDictionary

from kvdb.attention.triton.batch import PartialBuffer
from kvdb.attention.triton.coarse import CoarseWorkspace
from kvdb.attention.triton.workspace import DiprWorkspace
from kvdb.gpu.device import Device
from kvdb.gpu.launch import HoldsTensors, track_memory
from kvdb.storage.slot import SlotLayout

W = TypeVar("W", bound=HoldsTensors)
Shape = tuple[SlotLayout, int, int, int]
"""A layout, the number of sequences, the number of query heads, and the tokens of the longest sequence."""


class Scratch:
    """Workspaces on a device, for steps on its query stream. A workspace is freed with the last step that uses it. Thread-safe.

    partial: partial states of exact attention, as large as the largest step needed.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.partial = PartialBuffer(device.torch)
        self._dipr: WeakValueDictionary[Hashable, DiprWorkspace] = WeakValueDictionary()
        self._coarse: WeakValueDictionary[Hashable, CoarseWorkspace] = WeakValueDictionary()
        self._lock = Lock()

    def dipr(self, shape: Shape) -> DiprWorkspace:
        """A workspace for a DIPR search. Must be called inside `launching`."""
        shape = _rounded(shape)
        return self._shared(self._dipr, shape, lambda: DiprWorkspace.of(*shape, self._device.torch))

    def coarse(self, shape: Shape, k_pages: int) -> CoarseWorkspace:
        """A workspace for a search of the k_pages best pages. Must be called inside `launching`."""
        shape, k_pages = _rounded(shape), _power_of_two(k_pages)
        return self._shared(self._coarse, (shape, k_pages), lambda: CoarseWorkspace.of(*shape, k_pages, self._device.torch))

    def _shared(self, made: WeakValueDictionary[Hashable, W], key: Hashable, make: Callable[[], W]) -> W:
        """The workspace of this key, made where nobody uses one now."""
        with self._lock:
            workspace = made.get(key)
            if workspace is None:
                made[key] = workspace = make()
                track_memory(self._device, workspace)
            return workspace


def _rounded(shape: Shape) -> Shape:
    """The shape with up to twice as many tokens, so that contexts of similar lengths share a workspace."""
    return *shape[:3], _power_of_two(shape[3])


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
