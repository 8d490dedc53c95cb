"""Benchmarks of two checkouts in turns."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.turns import figures, run_in_turns

TURN_SECONDS = 0.02
CLOCK = """
import time
stops = []
end = time.monotonic() + 0.2
last = time.monotonic()
while last < end:
    now = time.monotonic()
    if now - last > 0.01:
        stops.append((last, now))
    last = now
print(*(f"{begin} {end}" for begin, end in stops), sep="\\n")
"""


def test_each_stands_still_while_the_other_has_its_turn() -> None:
    for lines in run_in_turns([(Path.cwd(), [sys.executable, "-c", CLOCK])] * 2, TURN_SECONDS):
        assert any(float(line.split()[1]) - float(line.split()[0]) > TURN_SECONDS / 2 for line in lines if line)


def test_all_that_is_printed_comes_back() -> None:
    commands = [(Path.cwd(), [sys.executable, "-c", f"for i in range(1000): print({word!r}, i)"]) for word in ("one", "two")]
    one, two = run_in_turns(commands, TURN_SECONDS)
    assert one == [f"one {i}" for i in range(1000)]
    assert two == [f"two {i}" for i in range(1000)]


def test_a_benchmark_that_fails_is_said() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run_in_turns([(Path.cwd(), [sys.executable, "-c", "raise SystemExit(3)"])], TURN_SECONDS)


def test_rates_are_no_times() -> None:
    line = '{"benchmark": "b", "tokens": 5, "decode_us": 3.5, "remote_gb_per_s": 1.5, "store_s": 2}'
    assert {name: value for (_, name), value in figures([line])} == {"decode_us": 3.5, "store_s": 2.0}
