"""Where the numbers of this machine are kept: a small JSON file, good for the machine that it names."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import kvdb._native as _native
from kvdb.config import OWN_CACHE
from kvdb.errors import ConfigError
from query_optimizer.cost import GpuMachine, Machine, WrongMachine

FORMAT = 1


@dataclass(frozen=True)
class Known:
    """The numbers in use. measured: whether they are this machine's, not the defaults. source: where from, or why."""

    machine: Machine
    measured: bool
    source: str


@dataclass(frozen=True)
class KnownGpu:
    """The numbers in use of a card. measured: whether they are that card's, not the assumed ones of another."""

    machine: GpuMachine
    measured: bool


def path_of(setting: str) -> Path | None:
    """The file that config's `optimizer.machine_file` means, None for no file."""
    if setting != OWN_CACHE:
        return Path(setting).expanduser() if setting else None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        return (folder if folder.is_absolute() else Path.home() / ".cache") / "kvdb" / "machine.json"
    except RuntimeError:  # nobody's home
        return None


def known(setting: str) -> Known:
    """What was measured before, or the defaults where nothing was, where it was on another machine, or where the file is damaged:
    such numbers are an estimate of speed, nothing that a database could not do without."""
    path = path_of(setting)
    if path is None:
        return Known(Machine(), False, "defaults: no file is set")
    try:
        return Known(read(path), True, str(path))
    except FileNotFoundError:
        return Known(Machine(), False, f"defaults: {path} does not exist yet")
    except (OSError, ConfigError) as error:
        return Known(Machine(), False, f"defaults: {error}")


def known_gpu(setting: str, card: str) -> KnownGpu:
    """What was measured of a card before, by its name, or the defaults wherever `known` would give those."""
    path = path_of(setting)
    try:
        gpus = {} if path is None else read_gpus(path)
    except (OSError, ConfigError):
        gpus = {}
    return KnownGpu(gpus.get(card, GpuMachine()), card in gpus)


def read(path: Path) -> Machine:
    """What `write` kept. Raises ConfigError for a file that is damaged or of another machine, OSError."""
    try:
        return Machine.from_dict(_mapping(_kept(path).get("machine")))
    except WrongMachine as error:
        raise ConfigError(f"{path}: {error}; write it anew with kvdb calibrate") from None


def read_gpus(path: Path) -> dict[str, GpuMachine]:
    """What `write` kept of this machine's cards, by their names. Raises as `read` does."""
    try:
        gpus = _mapping(_kept(path).get("gpus", {}))
        return {card: GpuMachine.from_dict(_mapping(numbers)) for card, numbers in gpus.items()}
    except WrongMachine as error:
        raise ConfigError(f"{path}: {error}; write it anew with kvdb calibrate") from None


def _kept(path: Path) -> Mapping[str, Any]:
    try:
        kept = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON ({error}); write it anew with kvdb calibrate") from None
    if not isinstance(kept, dict) or kept.get("format") != FORMAT:
        raise ConfigError(f"{path} holds no machine of format {FORMAT}; write it anew with kvdb calibrate")
    if kept.get("of") != identity():
        raise ConfigError(f"{path} is of another machine, {kept.get('of')}; measure this one with kvdb calibrate")
    return kept


def write(path: Path, machine: Machine, gpus: Mapping[str, GpuMachine] | None = None) -> None:
    """Keep the numbers, whole or not at all. gpus: of cards, by their names; those of others that were kept before stay. Raises
    ConfigError for a place that cannot be written."""
    kept: dict[str, Any] = {"format": FORMAT, "of": identity(), "machine": machine.to_dict()}
    try:
        cards = read_gpus(path)
    except (OSError, ConfigError):
        cards = {}
    if cards := cards | dict(gpus or {}):
        kept["gpus"] = {card: numbers.to_dict() for card, numbers in cards.items()}
    text = json.dumps(kept, indent=2) + "\n"
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
                part.unlink(missing_ok=True)  # gone, where all went well
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another file") from None


def identity() -> dict[str, Any]:
    """What the numbers depend on: processor, CPUs in use, instruction set."""
    return {"processor": _processor(), "cpus": _native.threads(), "isa": _native.isa()}


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
