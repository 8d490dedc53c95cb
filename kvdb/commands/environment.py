"""Finds what this machine has that kvdb can use, and which of it a configuration will use, without loading anything heavy."""

import errno
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvdb._native as _native
import kvdb.gpu.probe as probe
import kvdb.hardware.kernels as kernels
import kvdb.hardware.profile as profile
from kvdb.config import Config, StorageConfig
from kvdb.version import __version__

Section = dict[str, Any]
"""Plain values, as JSON has them. A name that ends in `bytes` holds a number of bytes; None stands for what is not there."""

INTERPRETER = "interpreter"
MEMORY = Path("/proc/meminfo")
DISTRIBUTIONS = {"triton": ("triton",), "faiss": ("faiss-gpu", "faiss-gpu-cu12", "faiss-cpu"), "hnswlib": ("hnswlib",)}
"""The distributions that provide each library, the preferred one first."""


def describe(config: Config) -> Section:
    """Everything that `kvdb doctor` says, in well under a second."""
    driver, torch = probe.find_driver(), probe.installed_torch()
    return {
        "kvdb": __version__,
        "processor": profile.identity()["processor"],
        "isa": _native.isa(),
        "isas": _native.isas(),
        "threads": _native.threads(),
        "memory": _memory(),
        "gpu": None if driver is None else asdict(driver),
        "python": platform.python_version(),
        "torch": None if torch is None else asdict(torch),
        **{name: _version(names) for name, names in DISTRIBUTIONS.items()},
        "disk": _disk(config.storage.path or config.storage.disk_path),
        "machine": _machine(config.optimizer.machine_file, driver),
        "use": {
            "kernels": [asdict(choice) for choice in kernels.choices(profile.load(config.optimizer.machine_file).kernels)],
            "attention": f"CPU ({_native.isa()}, {threads(_native.threads())})",
            **_gpu(config.storage, driver),
        },
    }


def threads(count: int) -> str:
    return f"{count} thread{'s' if count != 1 else ''}"


def _memory() -> Section:
    page = os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    try:
        available = re.search(r"^MemAvailable: +(\d+) kB$", MEMORY.read_text(), re.MULTILINE)
    except OSError:
        available = None
    return {
        "total_bytes": os.sysconf("SC_PHYS_PAGES") * page,
        "available_bytes": int(available.group(1)) << 10 if available else free,
    }


def _version(names: tuple[str, ...]) -> str | None:
    """The version of the first distribution that is installed, with its name where there are several."""
    for name in names:
        try:
            return version(name) if len(names) == 1 else f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    return None


def _disk(path: str) -> Section | None:
    """The folder of storage.path or storage.disk_path. direct: whether its files can be read past the page cache, None for
    unknown."""
    if not path:
        return None
    try:
        room = os.statvfs(path)
    except OSError as error:
        return {"path": path, "free_bytes": None, "direct": None, "trouble": error.strerror}
    return {"path": path, "free_bytes": room.f_bavail * room.f_frsize, "direct": _direct(path), "trouble": ""}


def _direct(path: str) -> bool | None:
    """Whether files can be read past the page cache, None for unknown. This is tried with a nameless file, which is gone at
    once."""
    flags = getattr(os, "O_TMPFILE", 0), getattr(os, "O_DIRECT", 0)
    if not all(flags):
        return None
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | sum(flags), 0o600))
    except OSError as error:
        return False if error.errno == errno.EINVAL else None
    return True


def _machine(setting: str, driver: probe.Driver | None) -> Section:
    """Whether the optimizer's numbers were measured on this machine, and on which of its cards."""
    loaded = profile.load(setting)
    cards = sorted({card.name for card in driver.cards}) if driver else []
    return {
        "measured": loaded.measured,
        "source": loaded.source,
        "gpus": {card: profile.load_gpu(setting, card).measured for card in cards},
    }


def _gpu(config: StorageConfig, driver: probe.Driver | None) -> Section:
    """The GPU that will be used, or why none is. refused: whether connect raises ConfigError, rather than using the CPU."""
    missing = probe.missing_requirement(config.gpu_device, driver)
    if not config.gpu_bytes_max:
        why = "storage.gpu_bytes_max is 0" if missing is None else missing.what
        return {"gpu": None, "why": why, "refused": False}
    if missing is not None:
        return {"gpu": None, "why": str(missing), "refused": False}
    why = _refusal(config, driver.cards if driver else ())
    if why:
        return {"gpu": None, "why": why, "refused": True}
    if config.gpu_device == INTERPRETER:
        return {"gpu": "Triton's interpreter on the CPU, for tests", "why": "", "refused": False}
    assert driver is not None
    return {
        "gpu": f"{driver.cards[probe.device_index(config.gpu_device)].name} ({config.gpu_device})",
        "why": "",
        "refused": False,
    }


def _refusal(config: StorageConfig, cards: Sequence[probe.Card]) -> str:
    """Why kvdb.connect will refuse these settings, "" where it will not. `kvdb.gpu` finds the same when it opens the device,
    which takes longer."""
    interpreting = os.environ.get("TRITON_INTERPRET", "0") not in {"", "0"}
    if config.gpu_device == INTERPRETER:
        return "" if interpreting else "storage.gpu_device is interpreter, without TRITON_INTERPRET=1 in the environment"
    number = probe.device_index(config.gpu_device)
    if number >= len(cards):
        return f"storage.gpu_device is {config.gpu_device}, and the driver shows {len(cards)} GPUs"
    if interpreting:
        return f"storage.gpu_device is {config.gpu_device}, with TRITON_INTERPRET set in the environment"
    if config.gpu_bytes_max > cards[number].memory_total:
        return (
            f"storage.gpu_bytes_max is {config.gpu_bytes_max:,} bytes, and {cards[number].name} has "
            f"{cards[number].memory_total:,}"
        )
    return ""
