"""Launching on a device."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock

import torch

from kvdb.attention.triton.pages import Pages
from kvdb.gpu.device import Device
from kvdb.gpu.streams import Stream

INTERPRETING = RLock()
"""Triton's interpreter keeps which program it is at for the whole process, so it takes one launch at a time."""


@contextmanager
def at_work(device: Device, stream: Stream) -> Iterator[None]:
    """What is allocated and launched inside goes to this stream. Raises CapacityError or GpuLost, as `Device.watch` does."""
    with INTERPRETING if device.interpreted else nullcontext(), device.watch(), device.on(stream):
        yield


def track(device: Device, *made: object) -> None:
    """Count the memory of every tensor that these objects of ours hold, and what they hold, as the device's; that of slabs is
    counted already."""
    storages: dict[int, torch.Tensor] = {}

    def walk(value: object) -> None:
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value
        elif isinstance(value, list | tuple):
            for one in value:
                walk(one)
        elif type(value).__module__.startswith("kvdb.") and not isinstance(value, Pages | Device):
            for one in vars(value).values():
                walk(one)

    for value in made:
        walk(value)
    for tensor in storages.values():
        device.tracked(tensor)
