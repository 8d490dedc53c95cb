"""Every benchmark says what it asks, and takes no time for it."""

import ast
import re
import runpy
import sys

import pytest

from tests.architecture.source import ROOT

STARTED_BY_OTHERS = {"service_process", "vllm_process"}
"""They serve a benchmark, and are given what it wants."""
PROGRAMS = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__main__"): path
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if re.search('^if __name__ == "__main__"', path.read_text(), re.MULTILINE) and path.stem not in STARTED_BY_OTHERS
}


def test_there_are_benchmarks():
    assert "benchmarks.attend" in PROGRAMS
    assert "benchmarks.gpu" in PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_benchmark_answers_help_with_its_docstring(program, monkeypatch, capsys):
    if program == "benchmarks.vllm_attention":
        pytest.importorskip("vllm")
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    monkeypatch.delitem(sys.modules, program, raising=False)  # where another test has imported it
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(program, run_name="__main__")
    docstring = ast.get_docstring(ast.parse(PROGRAMS[program].read_text()))
    assert ended.value.code == 0
    assert docstring.splitlines()[0] in capsys.readouterr().out
