"""The steps of the set-up say how far they are, and what failed."""

import subprocess
import sys
import time

from tests.architecture.source import ROOT


def steps(*given):
    return subprocess.run([sys.executable, ROOT / "scripts" / "steps.py", *given], capture_output=True, text=True, check=False)


def test_steps_say_when_they_begin_and_end():
    done = steps("compiling", "echo '[7/9] Building CXX'", "installing", "true")
    assert done.returncode == 0
    said = [line.partition(" s  ")[2] for line in done.stdout.splitlines()]
    assert said[:2] == ["compiling", "installing"]
    assert sorted(said[2:]) == ["compiling: done", "installing: done"]
    assert not done.stderr


def test_a_step_that_fails_shows_all_that_it_printed_and_ends_the_others(tmp_path):
    begun = time.monotonic()
    done = steps("compiling", "echo one; echo two >&2; exit 3", "installing", f"sleep 60; touch {tmp_path / 'ended'}")
    assert done.returncode == 3
    assert "compiling failed" in done.stdout
    assert done.stderr == "one\ntwo\n"
    assert time.monotonic() - begun < 50
    assert not (tmp_path / "ended").exists()
