"""Who may import whom."""

import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.architecture.source import ROOT, Module, imports, modules, read


def test_every_contract_is_kept() -> None:
    # In a process of its own, because it configures the logging of the one it is in.
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_contract_exempts_anything() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    settings = [linter, *linter["contracts"]]
    exemptions = re.compile("ignore|skip|exclude|allow_indirect")
    assert not [key for table in settings for key in table if exemptions.search(key)]


def test_no_import_cycle_even_lazy() -> None:
    assert cycle_in(modules()) is None


def test_a_lazy_import_counts_as_an_import(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "above.py").write_text("from package import below\n")
    (package / "below.py").write_text("def late():\n    from package.above import name\n")
    assert set(cycle_in(read(tmp_path, "package")) or ()) == {"package.above", "package.below"}


def test_imports_are_statements_that_can_be_followed() -> None:
    assert not [str(module) for module in modules() if "import_module" in module.text or "__import__" in module.text]


def cycle_in(found: list[Module]) -> list[str] | None:
    """The modules of one import cycle, in order, or None. That a module is preceded by the packages it is in is no import."""
    known = {module.name for module in found}
    graph = {module.name: imports(module, known) for module in found}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None
