"""Launching on a device, and counting the memory that is launched with."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Protocol

import torch

from kvdb.gpu.device import Device
from kvdb.gpu.streams import DeviceStream

INTERPRETER_LOCK = RLock()
"""Triton's interpreter keeps the number of its current program in a global variable, so it takes one launch at a time."""


class HoldsTensors(Protocol):
    """An object that keeps tensors on a device."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """All tensors that it holds, its parts' among them."""
        ...


@contextmanager
def launching(device: Device, stream: DeviceStream) -> Iterator[None]:
    """Tensors allocated and kernels launched inside belong to this stream. No other thread launches on it meanwhile: the launches
    of a step follow one another, in work space that the next step uses again. Raises CapacityError or GpuLost, as
    `Device.watch`."""
    with lock_of(device, stream), device.watch(), device.on(stream):
        yield


def lock_of(device: Device, stream: DeviceStream) -> "RLock":
    """The lock that whoever launches on the stream holds."""
    return INTERPRETER_LOCK if device.interpreted else device.launch_lock(stream)


def track_memory(device: Device, holder: HoldsTensors) -> None:
    """Count the memory of all its tensors as the device's. Views of one storage count once."""
    for tensor in holder.tensors():
        device.tracked(tensor)
