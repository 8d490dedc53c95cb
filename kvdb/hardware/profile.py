"""The measured numbers of this machine, kept in a small JSON file.

One file holds an entry for each setting under which a machine was measured: processor, threads in use and instruction set. So a
measurement with other threads, or on a machine that shares the home folder, does not replace the others.
"""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import kvdb._native as _native
from kvdb.config import OWN_CACHE
from kvdb.errors import ConfigError
from kvdb.hardware.kernels import KernelTimes
from query_optimizer.cost import GpuMachine, Machine, WrongMachine

FORMAT = 2
ENTRIES_MAX = 16
"""The number of entries that a file keeps; the oldest are dropped first."""


@dataclass(frozen=True)
class MachineProfile:
    """The numbers in use for this machine. measured: whether they were measured here; otherwise they are the defaults. source:
    the file they come from, or why they are the defaults. kernels: the times by which kernels are chosen, empty if there are
    none."""

    machine: Machine
    measured: bool
    source: str
    kernels: KernelTimes = field(default_factory=dict)


@dataclass(frozen=True)
class GpuProfile:
    """The numbers in use for a card. measured: whether they were measured on that card; otherwise they are the defaults."""

    machine: GpuMachine
    measured: bool


def path_of(setting: str) -> Path | None:
    """The file that the setting `optimizer.machine_file` means, None for no file."""
    if setting != OWN_CACHE:
        return Path(setting).expanduser() if setting else None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        return (folder if folder.is_absolute() else Path.home() / ".cache") / "kvdb" / "machine.json"
    except RuntimeError:  # the user has no home folder
        return None


def load(setting: str) -> MachineProfile:
    """The numbers measured before, or the defaults if there are none or the file is damaged. Never raises: the numbers only
    estimate speed, and a database works without them."""
    path = path_of(setting)
    if path is None:
        return MachineProfile(Machine(), False, "defaults: no file is set")
    try:
        return MachineProfile(read(path), True, str(path), read_kernels(path))
    except FileNotFoundError:
        return MachineProfile(Machine(), False, f"defaults: {path} does not exist yet")
    except (OSError, ConfigError) as error:
        return MachineProfile(Machine(), False, f"defaults: {error}")


def load_gpu(setting: str, card: str) -> GpuProfile:
    """The numbers measured before on the card of this name, or the defaults if there are none or the file is damaged."""
    path = path_of(setting)
    try:
        gpus = {} if path is None else read_gpus(path)
    except (OSError, ConfigError):
        gpus = {}
    return GpuProfile(gpus.get(card, GpuMachine()), card in gpus)


def read(path: Path) -> Machine:
    """The numbers of this machine that `write` kept. Raises ConfigError for a file that is damaged or has no entry of this
    machine, OSError for one that cannot be read."""
    try:
        return Machine.from_dict(_mapping(_own_entry(path).get("machine")))
    except WrongMachine as error:
        raise ConfigError(f"{path}: {error}; write it anew with kvdb calibrate") from None


def read_gpus(path: Path) -> dict[str, GpuMachine]:
    """The numbers of this machine's cards that `write` kept, by their names. Raises as `read` does."""
    try:
        gpus = _mapping(_own_entry(path).get("gpus", {}))
        return {card: GpuMachine.from_dict(_mapping(numbers)) for card, numbers in gpus.items()}
    except WrongMachine as error:
        raise ConfigError(f"{path}: {error}; write it anew with kvdb calibrate") from None


def read_kernels(path: Path) -> KernelTimes:
    """The times of this machine's kernels that `write` kept. Raises as `read` does."""
    kept = _own_entry(path).get("kernels", {})
    try:
        times = {
            operation: {isa: float(spent) for isa, spent in _mapping(of).items()} for operation, of in _mapping(kept).items()
        }
        if all(0 < spent < float("inf") for of in times.values() for spent in of.values()):
            return times
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{path}: times of kernels are no positive numbers; write it anew with kvdb calibrate")


def _own_entry(path: Path) -> Mapping[str, Any]:
    """The entry with the processor, threads and instruction set of this process. Raises ConfigError, OSError."""
    own, entries = identity(), _entries(path)
    for entry in entries:
        if entry.get("of") == own:
            return entry
    others = ", ".join(str(entry.get("of")) for entry in entries)
    raise ConfigError(f"{path} is of another machine or other threads, {others}; measure with kvdb calibrate")


def _entries(path: Path) -> list[Mapping[str, Any]]:
    """The entries of a file, the oldest first. Raises ConfigError, OSError."""
    try:
        kept = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON ({error}); write it anew with kvdb calibrate") from None
    entries = kept.get("entries") if isinstance(kept, dict) and kept.get("format") == FORMAT else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path} holds no machine of format {FORMAT}; write it anew with kvdb calibrate")
    return entries


def write(path: Path, machine: Machine, gpus: Mapping[str, GpuMachine] | None = None, kernels: KernelTimes | None = None) -> None:
    """Keep the numbers, whole or not at all, beside the entries of other machines and thread counts. gpus: the numbers of cards,
    by their names; those of other cards stay. kernels: the times by which they are chosen. Raises ConfigError for a place that
    cannot be written."""
    try:
        cards = read_gpus(path)
    except (OSError, ConfigError):
        cards = {}
    own: dict[str, Any] = {"of": identity(), "machine": machine.to_dict()}
    if kernels:
        own["kernels"] = {operation: dict(times) for operation, times in kernels.items()}
    if cards := cards | dict(gpus or {}):
        own["gpus"] = {card: numbers.to_dict() for card, numbers in cards.items()}
    try:
        others = [entry for entry in _entries(path) if entry.get("of") != own["of"]]
    except (OSError, ConfigError):
        others = []
    _replace(path, json.dumps({"format": FORMAT, "entries": [*others[1 - ENTRIES_MAX :], own]}, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    """Put a new file in the place of an old one. Raises ConfigError where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, prefix=path.name, suffix=".part", delete=False) as file:
            part = Path(file.name)
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)  # where all went well it is gone already
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another file") from None


def identity() -> dict[str, Any]:
    """The key of an entry: processor, threads in use, instruction set."""
    return {"processor": _processor(), "threads": _native.threads(), "isa": _native.isa()}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
            return next(names, "") or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise WrongMachine(f"a machine is described by {value!r}; expected a mapping of names to numbers")
    return value
