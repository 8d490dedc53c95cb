"""Launching on a device."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock

from kvdb.gpu.device import Device
from kvdb.gpu.streams import Stream

INTERPRETING = RLock()
"""Triton's interpreter keeps which program it is at for the whole process, so it takes one launch at a time."""


@contextmanager
def at_work(device: Device, stream: Stream) -> Iterator[None]:
    """What is allocated and launched inside goes to this stream. Raises CapacityError or GpuLost, as `Device.watch` does."""
    with INTERPRETING if device.interpreted else nullcontext(), device.watch(), device.on(stream):
        yield
