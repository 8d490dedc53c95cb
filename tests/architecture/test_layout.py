"""Where things stand: few loose modules, rooms in one order, and tests that mirror the tree."""

import re
import tomllib
from pathlib import Path

from tests.architecture.source import PACKAGES, ROOT

LOOSE_MAX = 10
LAYERS_MAX = 12
OWN_FOLDERS = {"architecture", "benchmarks", "congruence", "deploy", "docs", "examples", "fault", "fuzz", "native"}
"""Folders of tests that are about no single package."""
NATIVE_ROOMS = ("kernels", "simd", "pages", "attend", "steps", "bind")
"""Of kvdb/native, each over those before it; transport knows none of them, and bind all."""


def test_few_modules_of_kvdb_stand_outside_of_rooms() -> None:
    loose = {path.name.partition(".")[0] for path in (ROOT / "kvdb").iterdir() if path.suffix in {".py", ".pyi"}}
    assert len(loose) <= LOOSE_MAX, f"{sorted(loose)}: put the new one into a room"


def test_the_contract_of_the_rooms_lists_rooms_on_few_floors() -> None:
    layers = rooms_contract()
    assert len(layers) <= LAYERS_MAX
    named = [name for layer in layers for name in re.split(" *[:|] *", layer)]
    assert len(named) == len(set(named))
    loose = {path.name.partition(".")[0] for path in (ROOT / "kvdb").iterdir() if path.is_file()}
    assert set(named) == (rooms(ROOT / "kvdb") | loose) - {"__init__", "py"}


def test_every_folder_of_tests_mirrors_a_room() -> None:
    homes = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    homeless = {str(home) for home in homes if home.parts[0] not in OWN_FOLDERS and not (ROOT / home).is_dir()}
    assert not homeless, "tests of a room stand in a folder of its name"
    assert rooms(ROOT / "tests") <= OWN_FOLDERS | set(PACKAGES)


def test_rooms_of_native_code_include_only_those_below() -> None:
    allowed = {room: {*NATIVE_ROOMS[: floor + 1]} for floor, room in enumerate(NATIVE_ROOMS)} | {"transport": {"transport"}}
    allowed["bind"].add("transport")
    native = ROOT / "kvdb" / "native"
    files = [path for path in native.rglob("*") if path.is_file()]
    assert {path.relative_to(native).parts[0] for path in files} == set(allowed), "a room for each file"
    upward = [
        f"{path.relative_to(native)}: {room}"
        for path in files
        for room in re.findall(r'^#include "\.\./(\w+)/', path.read_text(), re.MULTILINE)
        if room not in allowed[path.relative_to(native).parts[0]]
    ]
    assert not upward


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^\.PHONY: (\S+)$", makefile, re.MULTILINE)) - {"FORCE"}
    assert targets == set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))


def rooms_contract() -> list[str]:
    """The layers of kvdb in the import-linter contract, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("containers") == ["kvdb"])
    return list(layers)


def rooms(folder: Path) -> set[str]:
    """The folders in a folder that hold Python files."""
    return {path.parent.relative_to(folder).parts[0] for path in folder.glob("*/**/*.py")}
