"""The short form of `make fuzz`: wrong calls of the compiled modules as they are installed, without the sanitizers."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import copy

import pytest

ROOT = Path(__file__).parents[2]
INSTALLED_FIRST = """
import sys
import indexes._native
from tests.fuzz import native

sys.argv[1:] = [sys.argv[1], "--package", "kvdb", "--seconds", "0.1"]
sys.exit(native.main())
"""


@pytest.mark.parametrize("package", ["indexes", "kvdb"])
def test_wrong_calls_are_answered_or_refused_and_end_no_process(package):
    directory = Path(find_spec(f"{package}._native").origin).parents[1]
    command = [sys.executable, "-m", "tests.fuzz.native", directory, "--package", package, "--seconds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{package} used " in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="only there is it known what a process has loaded")
def test_modules_that_stand_on_the_installed_base_are_not_fuzzed(tmp_path):
    """Modules of another directory, whose base has the SONAME of the installed one, which is there already."""
    installed = Path(find_spec("kvdb._native").origin).parents[1]
    for package in ("indexes", "kvdb"):
        (tmp_path / package).mkdir()
        for file in [*installed.glob(f"{package}/_native*.so"), *installed.glob(f"{package}/libkvdb_base*")]:
            copy(file, tmp_path / package)
    command = [sys.executable, "-c", INSTALLED_FIRST, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"expected the one in {tmp_path / 'indexes'}" in done.stderr
    command = [sys.executable, "-m", "tests.fuzz.native", tmp_path, "--package", "kvdb", "--seconds", "0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
