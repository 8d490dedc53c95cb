"""`kvdb doctor`: what was found on this machine, and what of it will be used."""

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import kvdb.config as configuration
from kvdb.commands.found import Found, look, threads
from kvdb.config import StorageConfig

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

GIB = 1 << 30
Row = tuple[str, str]


def add(commands: "Subparsers") -> None:
    """Add it to the `kvdb` command."""
    what = "say what this machine has and what kvdb will use of it"
    parser = commands.add_parser("doctor", help=what, description=f"{what.capitalize()}. Changes nothing.")
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=_doctor)


def _doctor(given: argparse.Namespace) -> int:
    config = configuration.load(given.config)
    found = look(config)
    if given.json:
        print(json.dumps(found, indent=2))
        return 0
    sections = {"found": list(_found(found)), "will be used": list(_used(found["use"], config.storage))}
    width = max(len(name) for rows in sections.values() for name, _ in rows)
    for title, rows in sections.items():
        print(title)
        for name, said in rows:
            print(f"  {name:<{width}}  {said}")
    return 0


def _found(found: Found) -> Iterator[Row]:
    yield "kvdb", f"{found['kvdb']}, Python {found['python']}"
    yield "processor", f"{found['processor']}, {threads(found['threads'])}"
    others = [isa for isa in found["isas"] if isa != found["isa"]]
    yield "instruction set", found["isa"] + (f" (also {', '.join(others)})" if others else "")
    memory = found["memory"]
    yield "memory", f"{_size(memory['total_bytes'])}, {_size(memory['available_bytes'])} available"
    yield from _gpus(found)
    torch = found["torch"]
    if torch is None:
        yield "torch", "not installed"
    else:
        yield "torch", f"{torch['version']}, built " + (f"with CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA")
    for name in ("triton", "faiss", "hnswlib"):
        yield name, found[name] or "not installed"
    yield "disk", _disk(found["disk"])
    machine = found["machine"]
    yield "calibration", f"kept in {machine['source']}" if machine["measured"] else f"{machine['source']}; run kvdb calibrate"


def _gpus(found: Found) -> Iterator[Row]:
    driver = found["gpu"]
    if driver is None:
        yield "GPU driver", "none"
        return
    yield "GPU driver", f"NVIDIA {driver['version'] or 'of unknown version'}, for CUDA up to {driver['cuda']}"
    if driver["trouble"]:
        yield "GPU", driver["trouble"]
    for number, card in enumerate(driver["cards"]):
        capability = ".".join(map(str, card["capability"]))
        speed = "calibrated" if found["machine"]["gpus"].get(card["name"]) else "not calibrated; run kvdb calibrate"
        yield f"GPU {number}", f"{card['name']}, {_size(card['memory_total'])}, compute capability {capability}, {speed}"


def _used(use: Found, config: StorageConfig) -> Iterator[Row]:
    yield "attention", use["attention"]
    if use["gpu"] is None:
        yield "GPU", f"none, because {use['why']}"
        if use["refused"]:
            yield "", "kvdb.connect refuses these settings"
        return
    form = f"as {config.gpu_format}" if config.gpu_format else "in the model's dtype"
    yield "GPU", f"{use['gpu']}, {_size(config.gpu_bytes_max)} for blocks {form}"


def _disk(disk: Found | None) -> str:
    if disk is None:
        return "no folder is set (storage.disk_path)"
    if disk["trouble"]:
        return f"{disk['path']}: {disk['trouble']}"
    past = {True: "read past the page cache", False: "read through the page cache", None: "read past the page cache if it can be"}
    return f"{disk['path']}, {_size(disk['free_bytes'])} free, {past[disk['direct']]}"


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:,.1f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):,.1f} MiB"
