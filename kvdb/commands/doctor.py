"""`kvdb doctor`: what this machine has, and which of it kvdb will use."""

import argparse
import json
from collections.abc import Iterator

import kvdb.hardware.cpu as cpu
import kvdb.hardware.kernels as kernels
from kvdb.commands.arguments import Subparsers, add_command, add_json
from kvdb.commands.environment import Section, describe, threads
from kvdb.commands.settings import add_settings, loaded
from kvdb.config import StorageConfig

GIB = 1 << 30
Row = tuple[str, str]


def add(commands: Subparsers) -> None:
    """Add `doctor` to the `kvdb` command."""
    what = "say what this machine has and what kvdb will use of it"
    parser = add_command(commands, "doctor", what, _doctor, more=". Changes nothing.")
    add_json(parser)
    add_settings(parser)


def _doctor(given: argparse.Namespace) -> int:
    config = loaded(given).config
    cpu.use(config.cpu)
    environment = describe(config)
    if given.json:
        print(json.dumps(environment, indent=2))
        return 0
    sections = {"found": list(_machine(environment)), "will be used": list(_used(environment["use"], config.storage))}
    width = max(len(name) for rows in sections.values() for name, _ in rows)
    for title, rows in sections.items():
        print(title)
        for name, text in rows:
            print(f"  {name:<{width}}  {text}")
    return 0


def _machine(environment: Section) -> Iterator[Row]:
    yield "kvdb", f"{environment['kvdb']}, Python {environment['python']}"
    yield "processor", f"{environment['processor']}, {threads(environment['threads'])}"
    others = [isa for isa in environment["isas"] if isa != environment["isa"]]
    yield "instruction set", environment["isa"] + (f" (also {', '.join(others)})" if others else "")
    memory = environment["memory"]
    yield "memory", f"{_size(memory['total_bytes'])}, {_size(memory['available_bytes'])} available"
    yield from _gpus(environment)
    torch = environment["torch"]
    if torch is None:
        yield "torch", "not installed"
    else:
        yield "torch", f"{torch['version']}, built " + (f"with CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA")
    for name in ("triton", "faiss", "hnswlib"):
        yield name, environment[name] or "not installed"
    yield "disk", _disk(environment["disk"])
    numbers = environment["machine"]
    yield "calibration", f"kept in {numbers['source']}" if numbers["measured"] else f"{numbers['source']}; run kvdb calibrate"


def _gpus(environment: Section) -> Iterator[Row]:
    driver = environment["gpu"]
    if driver is None:
        yield "GPU driver", "none"
        return
    yield "GPU driver", f"NVIDIA {driver['version'] or 'of unknown version'}, for CUDA up to {driver['cuda']}"
    if driver["trouble"]:
        yield "GPU", driver["trouble"]
    for number, card in enumerate(driver["cards"]):
        capability = ".".join(map(str, card["capability"]))
        speed = "calibrated" if environment["machine"]["gpus"].get(card["name"]) else "not calibrated; run kvdb calibrate"
        yield f"GPU {number}", f"{card['name']}, {_size(card['memory_total'])}, compute capability {capability}, {speed}"


def _used(use: Section, config: StorageConfig) -> Iterator[Row]:
    yield "attention", use["attention"]
    for choice in use["kernels"]:
        yield f"kernels of {choice['operation']}", kernels.described(kernels.KernelChoice(**choice))
    if use["gpu"] is None:
        yield "GPU", f"none, because {use['why']}"
        if use["refused"]:
            yield "", "kvdb.connect refuses these settings"
        return
    form = f"as {config.gpu_format}" if config.gpu_format else "in the model's dtype"
    yield "GPU", f"{use['gpu']}, {_size(config.gpu_bytes_max)} for blocks {form}"


def _disk(disk: Section | None) -> str:
    if disk is None:
        return "no folder is set (storage.disk_path)"
    if disk["trouble"]:
        return f"{disk['path']}: {disk['trouble']}"
    past = {True: "read past the page cache", False: "read through the page cache", None: "read past the page cache if it can be"}
    return f"{disk['path']}, {_size(disk['free_bytes'])} free, {past[disk['direct']]}"


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:,.1f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):,.1f} MiB"
