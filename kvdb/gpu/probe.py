"""The GPUs of this machine, asked of the driver itself, and what is missing for kvdb to use one. Imports no torch."""

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DRIVER_LIBRARY = "libcuda.so.1"
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: there is no card, or CUDA_VISIBLE_DEVICES hides all of them."""
MAJOR, MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
CAPABILITY_MIN = (8, 0)
"""Ampere, the first to multiply bfloat16 and to copy to shared memory while it computes."""
INSTALL = "pip install 'kvdb[gpu]'"


@dataclass(frozen=True)
class Card:
    """A GPU. memory_total: bytes. capability: its compute capability, such as (9, 0) for an H200."""

    name: str
    memory_total: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """The driver and its cards. version: "" where it is unknown. cuda: the newest CUDA that it runs. trouble: why there are no
    cards."""

    version: str
    cuda: str
    cards: tuple[Card, ...]
    trouble: str = ""


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch, as its files say. cuda: the CUDA it was built with, None for a build without."""

    version: str
    cuda: str | None


@dataclass(frozen=True)
class MissingRequirement:
    """Something that a GPU needs and that is not there. what: says what is missing. remedy: what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


class _DriverError(Exception):
    """A call of the driver failed."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def find_driver() -> Driver | None:
    """The driver and its cards, as CUDA_VISIBLE_DEVICES lets them be seen; None without a driver. Takes no memory of a card."""
    try:
        library = ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return None
    version, cuda = _driver_version(), ctypes.c_int(0)
    ask = _caller(library)
    try:
        ask("cuDriverGetVersion", ctypes.byref(cuda))
        ask("cuInit", 0)
        cards = _cards(ask)
    except _DriverError as error:
        trouble = "no card" if error.status == NO_DEVICE else str(error)
        return Driver(version, _cuda_version(cuda.value), (), trouble)
    return Driver(version, _cuda_version(cuda.value), cards, "" if cards else "no card")


def installed_torch() -> TorchBuild | None:
    """The installed torch; None without one."""
    package = find_spec("torch")
    if package is None or package.origin is None:
        return None
    try:
        text = (Path(package.origin).parent / "version.py").read_text()
    except OSError:
        return TorchBuild("", None)
    return TorchBuild(_assigned(text, "__version__") or "", _assigned(text, "cuda"))


def triton_installed() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def missing_requirement(device: str, driver: Driver | None) -> MissingRequirement | None:
    """The first thing that `device`, as storage.gpu_device names it, needs and that is not there; None where it can be opened.
    driver: what `find_driver` found."""
    torch = installed_torch()
    if device != "interpreter" and (nothing := _missing_card(device_index(device), driver)) is not None:
        return nothing
    if torch is None:
        return MissingRequirement("torch is not installed", INSTALL)
    if not triton_installed():
        return MissingRequirement("triton is not installed", INSTALL)
    if device != "interpreter" and torch.cuda is None:
        return MissingRequirement(
            f"torch {torch.version} is built without CUDA", "install a build with it, see https://pytorch.org"
        )
    return None


def device_index(device: str) -> int:
    """The number in a device's name: 1 for "cuda:1", 0 for "cuda"."""
    return int(device.partition(":")[2] or 0)


def _missing_card(index: int, driver: Driver | None) -> MissingRequirement | None:
    if driver is None:
        return MissingRequirement("there is no NVIDIA driver", "install it, or set storage.gpu_bytes_max to 0")
    if not driver.cards:
        return MissingRequirement(f"the driver shows no GPU ({driver.trouble})", "look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    if index < len(driver.cards) and driver.cards[index].capability < CAPABILITY_MIN:
        has, needs = (".".join(map(str, capability)) for capability in (driver.cards[index].capability, CAPABILITY_MIN))
        return MissingRequirement(f"{driver.cards[index].name} has compute capability {has}", f"kernels need {needs} or more")
    return None


def _caller(library: Any) -> Callable[..., None]:
    def ask(call: str, *arguments: Any) -> None:
        status = int(getattr(library, call)(*arguments))
        if status:
            text = ctypes.c_char_p()
            library.cuGetErrorString(status, ctypes.byref(text))
            said = text.value.decode(errors="replace") if text.value else "unknown"
            raise _DriverError(status, f"{call} failed with {status}, {said}")

    return ask


def _cards(ask: Callable[..., None]) -> tuple[Card, ...]:
    count = ctypes.c_int(0)
    ask("cuDeviceGetCount", ctypes.byref(count))
    return tuple(_card(ask, index) for index in range(count.value))


def _card(ask: Callable[..., None], index: int) -> Card:
    device, name, memory = ctypes.c_int(0), ctypes.create_string_buffer(256), ctypes.c_size_t(0)
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    ask("cuDeviceGet", ctypes.byref(device), index)
    ask("cuDeviceGetName", name, len(name), device)
    ask("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    ask("cuDeviceGetAttribute", ctypes.byref(major), MAJOR, device)
    ask("cuDeviceGetAttribute", ctypes.byref(minor), MINOR, device)
    return Card(name.value.decode(errors="replace"), memory.value, (major.value, minor.value))


def _driver_version() -> str:
    try:
        version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", DRIVER_VERSION.read_text(errors="replace"))
    except OSError:
        return ""
    return version.group() if version else ""


def _cuda_version(device_index: int) -> str:
    return f"{device_index // 1000}.{device_index % 1000 // 10}"


def _assigned(text: str, name: str) -> str | None:
    """The string that torch's version.py assigns to a name; None where it assigns none."""
    line = re.search(rf"^{name}\b[^=\n]*= *'([^']*)'", text, re.MULTILINE)
    return line.group(1) if line else None
