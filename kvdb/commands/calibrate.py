"""`kvdb calibrate`: measure this machine, and keep the numbers where the optimizer finds them."""

import argparse
from collections.abc import Mapping
from time import perf_counter

import kvdb.config as configuration
import kvdb.gpu.probe as probe
import kvdb.hardware.cpu as cpu
import kvdb.hardware.kernels as kernels
import kvdb.hardware.profile as profile
from kvdb.commands.arguments import Subparsers, add_command
from kvdb.commands.output import table
from kvdb.config import StorageConfig
from kvdb.errors import CapacityError, GpuLost, Unsupported
from kvdb.hardware.calibrate import BUSY_LOAD, calibrate, current_load
from query_optimizer.cost import GpuMachine

SHOWN = (
    ("stream_bytes_s", "attention over main memory", 1e9, "GB/s"),
    ("cached_bytes_s", "attention over what caches hold", 1e9, "GB/s"),
    ("cache_bytes", "what caches hold", 1e6, "MB"),
    ("operations_s", "multiplications", 1e9, "G/s"),
    ("jump_s", "read of a key in no cache, on one core", 1e-9, "ns"),
    ("gather_bytes_s", "values at scattered places", 1e9, "GB/s"),
    ("exact_call_s", "shortest exact call", 1e-6, "us"),
    ("step_s", "step by an index, without its searches", 1e-6, "us"),
    ("search_s", "shortest search", 1e-6, "us"),
)
"""The fields of Machine that are shown: name, description, and unit."""
GPU_SHOWN = (
    ("stream_bytes_s", "memory of the GPU", 1e9, "GB/s"),
    ("gather_bytes_s", "tokens at scattered places", 1e9, "GB/s"),
    ("operations_s", "multiplications", 1e12, "T/s"),
    ("host_bytes_s", "copies from main memory", 1e9, "GB/s"),
    ("call_s", "shortest call", 1e-6, "us"),
    ("step_s", "shortest step of a search", 1e-6, "us"),
)
"""The same for GpuMachine."""
Shown = tuple[tuple[str, str, float, str], ...]


def add(commands: Subparsers) -> None:
    """Add `calibrate` to the `kvdb` command."""
    more = ". Takes less than a second, and some more with a GPU."
    parser = add_command(commands, "calibrate", "measure this machine for the optimizer", _calibrate, more=more)
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--config", metavar="FILE", help="a TOML file of settings, whose optimizer.machine_file says where to keep the numbers"
    )
    place.add_argument("--file", metavar="FILE", help="where to keep the numbers (default: in the user's cache folder)")


def _calibrate(given: argparse.Namespace) -> int:
    config = configuration.load(given.config)
    cpu.use(config.cpu)
    setting = config.optimizer.machine_file if given.file is None else given.file
    path, before, load = profile.path_of(setting), profile.load(setting), current_load()
    started = perf_counter()
    found = calibrate()
    spent = perf_counter() - started
    try:
        gpus, trouble = _gpu(config.storage), ""
    except (CapacityError, GpuLost, Unsupported) as error:
        gpus, trouble = {}, str(error)
    tables = [_table(SHOWN, found.machine.to_dict(), before.machine.to_dict(), "before" if before.measured else "default")]
    for card, gpu in gpus.items():
        kept = profile.load_gpu(setting, card)
        name = "before" if kept.measured else "assumed"
        tables.append(f"{card}\n{_table(GPU_SHOWN, gpu.to_dict(), kept.machine.to_dict(), name)}")
    tables.append(
        "\n".join(f"kernels of {choice.operation}: {kernels.described(choice)}" for choice in kernels.choices(found.kernels))
    )
    busy = load > BUSY_LOAD
    print("\n\n".join(tables))
    if path is None:
        print(f"measured in {spent:.1f} s, kept nowhere: no file is set; --file names one")
    elif busy and before.measured:
        print(f"measured in {spent:.1f} s, not kept: {path} holds what was measured before")
    else:
        profile.write(path, found.machine, gpus, found.kernels)
        print(f"measured in {spent:.1f} s, kept in {path}")
    if not before.measured:
        print(f"until now: {before.source}")
    if trouble:
        print(f"the GPU was not measured: {trouble}")
    if busy:
        print(f"the machine was busy, with a load of {load:.1f} for each CPU; measure again when it is not")
    return 0


def _gpu(config: StorageConfig) -> dict[str, GpuMachine]:
    """Measure the card that the configuration names: its name and its numbers, or nothing where there is none that can be used.
    Raises ConfigError, Unsupported, CapacityError or GpuLost."""
    if probe.missing_requirement(config.gpu_device, probe.find_driver()) is not None:
        return {}
    from kvdb.gpu.calibrate import calibrate as calibrate_gpu  # torch takes seconds to import, and may not be there
    from kvdb.gpu.device import open_device

    device = open_device(config.gpu_device)
    try:
        return {device.card: calibrate_gpu(device)}
    finally:
        device.close()


def _table(shown: Shown, new: Mapping[str, float], old: Mapping[str, float], name: str) -> str:
    rows = [("what", "value", "unit", name, "change")]
    for field, what, unit, unit_name in shown:
        change = f"{new[field] / old[field] - 1:+.0%}"
        rows.append((what, f"{new[field] / unit:,.1f}", unit_name, f"{old[field] / unit:,.1f}", change))
    return table(rows, left={"what", "unit"})
