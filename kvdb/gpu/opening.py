"""Opening the GPU that a configuration asks for, or logging one line that says why there is none."""

import logging
from typing import TYPE_CHECKING

import kvdb.gpu.probe as probe
import kvdb.hardware.profile as profile
from indexes.accelerate import Accelerator
from kvdb.config import StorageConfig
from kvdb.errors import CapacityError, ConfigError, GpuLost, Unsupported
from kvdb.storage.store import BlockStore

if TYPE_CHECKING:
    from kvdb.gpu.backend import GpuBackend
    from kvdb.gpu.device import Device

log = logging.getLogger(__name__)


def open_configured_device(config: StorageConfig) -> "Device | None":
    """The device that the configuration asks for. None where it asks for none, or, with a warning logged, none can be used.

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


def open_backend(device: "Device | None", blocks: BlockStore, machine_file: str) -> "GpuBackend | None":
    """The backend on an open device; None without one. machine_file: config's `optimizer.machine_file`."""
    if device is None:
        return None
    from kvdb.gpu.backend import GpuBackend  # it imports Triton, which only a GPU needs

    return GpuBackend(device, blocks, profile.load_gpu(machine_file, device.card).machine)


def open_accelerator(device: "Device | None") -> Accelerator | None:
    """The builder of indexes on an open device. None without one, or, with a warning logged, where the device fails."""
    if device is None:
        return None
    from kvdb.gpu.index_build.accelerator import DeviceAccelerator  # it imports torch, which only a GPU needs

    try:
        return DeviceAccelerator(device)
    except (CapacityError, GpuLost) as error:
        log.warning("indexes are built on the CPU: %s", error)
        return None


def _open(name: str) -> "Device":
    """Open a device. torch is imported only when nothing else is missing. Raises Unsupported, also where torch is not
    installed."""
    missing = probe.missing_requirement(name, None if name == "interpreter" else probe.find_driver())
    if missing is not None:
        raise Unsupported(str(missing))
    from kvdb.gpu.device import open_device  # torch takes seconds to import, and may not be there

    return open_device(name)
