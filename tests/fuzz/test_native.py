"""The short form of `make fuzz`: wrong calls of the compiled modules as they are installed, without the sanitizers."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["indexes", "kvdb"])
def test_wrong_calls_are_answered_or_refused_and_end_no_process(package):
    directory = Path(find_spec(f"{package}._native").origin).parents[1]
    command = [sys.executable, "-m", "tests.fuzz.native", directory, "--package", package, "--seconds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{package} used " in done.stdout
