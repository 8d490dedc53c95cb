"""The GPU that a configuration asks for, or one line that says why there is none."""

import logging
from typing import TYPE_CHECKING

import kvdb.gpu.probe as probe
import kvdb.machine as machine
from indexes.accelerate import Accelerator
from kvdb.config import StorageConfig
from kvdb.errors import CapacityError, ConfigError, GpuLost, Unsupported
from kvdb.storage.store import BlockStore

if TYPE_CHECKING:
    from kvdb.gpu.device import Device
    from kvdb.gpu.gpu import Gpu

log = logging.getLogger(__name__)


def open_gpu(config: StorageConfig) -> "Device | None":
    """None where the configuration asks for no GPU, and, with a warning logged, where there is none that can be used.

    Raises ConfigError for a device that does not exist, or a budget that is larger than its memory.
    """
    if not config.gpu_bytes_max:
        return None
    try:
        device = _open(config.gpu_device)
    except (Unsupported, GpuLost) as error:
        log.warning("storage.gpu_bytes_max asks for a GPU, but queries will be answered by the CPU: %s", error)
        return None
    if config.gpu_bytes_max > device.memory_total:
        raise ConfigError(
            f"storage.gpu_bytes_max is {config.gpu_bytes_max:,} bytes, and {device.name} has {device.memory_total:,}; "
            "expected less, with room for block tables, results, and what else uses it"
        )
    return device


def serving(device: "Device | None", blocks: BlockStore, machine_file: str) -> "Gpu | None":
    """What answers on an open device; None without one. machine_file: config's `optimizer.machine_file`."""
    if device is None:
        return None
    from kvdb.gpu.gpu import Gpu  # it imports Triton, which only a GPU needs

    return Gpu(device, blocks, machine.known_gpu(machine_file, device.card).machine)


def building(device: "Device | None") -> Accelerator | None:
    """What takes part in builds of indexes on an open device; None without one, or, with a warning logged, where it fails."""
    if device is None:
        return None
    from kvdb.gpu.build import DeviceAccelerator  # it imports torch, which only a GPU needs

    try:
        return DeviceAccelerator(device)
    except (CapacityError, GpuLost) as error:
        log.warning("indexes are built on the CPU: %s", error)
        return None


def _open(name: str) -> "Device":
    """Raises Unsupported without torch too, which is why it is not imported before something else is found missing."""
    missing = probe.missing(name, None if name == "interpreter" else probe.look())
    if missing is not None:
        raise Unsupported(str(missing))
    from kvdb.gpu.device import open_device  # torch takes seconds to import, and may not be there

    return open_device(name)
