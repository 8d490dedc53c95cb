"""`kvdb calibrate`: measure this machine, and keep the numbers where the optimizer finds them."""

import argparse
import os
from time import perf_counter
from typing import TYPE_CHECKING

import kvdb.config as configuration
import kvdb.machine as machine_file
from kvdb.calibrate import calibrate
from query_optimizer.cost import Machine

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SHOWN = (
    ("stream_bytes_s", "attention over main memory", 1e9, "GB/s"),
    ("cached_bytes_s", "attention over what caches hold", 1e9, "GB/s"),
    ("cache_bytes", "which is", 1e6, "MB"),
    ("operations_s", "multiplications", 1e9, "G/s"),
    ("jump_s", "key in no cache, on one core", 1e-9, "ns"),
    ("gather_bytes_s", "values here and there", 1e9, "GB/s"),
    ("exact_call_s", "shortest exact call", 1e-6, "us"),
    ("step_s", "step by an index, beside its searches", 1e-6, "us"),
    ("search_s", "shortest search", 1e-6, "us"),
)
"""Field of Machine, what it is, the unit it is shown in."""


def add(commands: "Subparsers") -> None:
    """Add it to the `kvdb` command."""
    what = "measure this machine for the optimizer"
    parser = commands.add_parser("calibrate", help=what, description=f"{what.capitalize()}. Takes less than a second.")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--config", metavar="FILE", help="a TOML file of settings, of which optimizer.machine_file says where")
    place.add_argument("--file", metavar="FILE", help="where to keep the numbers (default: in the user's cache folder)")
    parser.set_defaults(run=_calibrate)


def _calibrate(given: argparse.Namespace) -> int:
    setting = configuration.load(given.config).optimizer.machine_file if given.file is None else given.file
    path = machine_file.path_of(setting)
    before, load = machine_file.known(setting), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    started = perf_counter()
    machine = calibrate()
    spent = perf_counter() - started
    if path is not None:
        machine_file.write(path, machine)
    print(_table(machine, before.machine, "before" if before.measured else "default"))
    print(f"measured in {spent:.1f} s, {f'kept in {path}' if path else 'kept nowhere: no file is set; --file names one'}")
    if not before.measured:
        print(f"until now: {before.source}")
    cpus = int(machine_file.identity()["cpus"])
    if load > cpus:
        print(f"the machine was busy, with a load of {load:.1f} on {cpus} CPUs; measure again when it is not")
    return 0


def _table(machine: Machine, before: Machine, name: str) -> str:
    rows = [("what", "value", "unit", name, "change")]
    new, old = machine.to_dict(), before.to_dict()
    for field, what, unit, unit_name in SHOWN:
        change = f"{new[field] / old[field] - 1:+.0%}"
        rows.append((what, f"{new[field] / unit:,.1f}", unit_name, f"{old[field] / unit:,.1f}", change))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = (str.ljust, str.rjust, str.ljust, str.rjust, str.rjust)
    return "\n".join(
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip() for row in rows
    )
