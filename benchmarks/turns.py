"""Is one checkout slower than another? A benchmark runs in both at once, and each is stopped while the other has its turn.

    python -m benchmarks.turns --before ../other --rounds 3 embedded
    python -m benchmarks.turns --before ../other retrieve --quick --tokens 16384

Turns are short, so that a machine that drifts does so for both; a call in which a turn ends counts the other's turn too, which
the benchmarks' medians do not see. What follows the benchmark's name goes to it. One JSON line for each time that both print:
medians over the rounds, and after over before; a last line has the median ratio of each field. A checkout's own `.venv` runs it,
if it has one.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import IO

from benchmarks.harness import argument_parser, report

TIMES = ("_ns", "_us", "_ms", "_s", "seconds")
"""Endings of the fields that are compared: times, of which less is better."""
Key = tuple[str, str]
"""A line's settings, as JSON, and the name of one of its figures."""


def main() -> int:
    given = arguments()
    checkouts = {"before": given.before.resolve(), "after": Path.cwd()}
    seen: dict[str, dict[Key, list[float]]] = {side: defaultdict(list) for side in checkouts}
    for _ in range(given.rounds):
        printed = run_in_turns(
            [command(path, given.benchmark, given.arguments) for path in checkouts.values()], given.turn_seconds
        )
        for side, lines in zip(checkouts, printed, strict=True):
            for key, value in figures(lines):
                seen[side][key].append(value)
    both = [key for key in seen["before"] if key in seen["after"]]
    if not both:
        print("benchmarks.turns: the two checkouts print no figure in common", file=sys.stderr)
        return 1
    ratios: dict[str, list[float]] = defaultdict(list)
    for settings, field in both:
        before, after = (median(seen[side][settings, field]) for side in ("before", "after"))
        if before > 0:
            ratios[field].append(after / before)
            line = json.loads(settings)
            line["of"] = line.pop("benchmark")
            report("turns", **line, field=field, before=before, after=after, ratio=after / before)
    report(
        "turns.summary", of=given.benchmark, rounds=given.rounds, **{field: median(values) for field, values in ratios.items()}
    )
    return 0


def command(checkout: Path, benchmark: str, arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder in which a checkout's benchmark is started, and how."""
    python = checkout / ".venv/bin/python"
    return checkout, [str(python) if python.exists() else sys.executable, "-m", f"benchmarks.{benchmark}", *arguments]


def run_in_turns(commands: Iterable[tuple[Path, list[str]]], turn_seconds: float) -> list[list[str]]:
    """The lines that each of some commands prints. One runs at a time, each with its children. Raises CalledProcessError where
    one fails."""
    with ExitStack() as stack:
        files = []
        processes = []
        for folder, arguments in commands:
            files.append(stack.enter_context(TemporaryFile("w+")))
            processes.append(stack.enter_context(stopped(folder, arguments, files[-1])))
        running = processes
        while running:
            for process in running:
                os.killpg(process.pid, signal.SIGCONT)
                try:
                    process.wait(turn_seconds)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGSTOP)
            running = [process for process in running if process.returncode is None]
        for process in processes:
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args)
        for file in files:
            file.seek(0)
        return [file.read().splitlines() for file in files]


@contextmanager
def stopped(folder: Path, arguments: list[str], output: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """A process group of its own that waits to be continued; it is killed in the end."""
    with subprocess.Popen(arguments, cwd=folder, stdout=output, text=True, start_new_session=True) as process:
        os.killpg(process.pid, signal.SIGSTOP)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def figures(lines: Iterable[str]) -> list[tuple[Key, float]]:
    """The times among the figures of a benchmark's lines."""
    found = []
    for line in lines:
        if line.startswith("{"):
            fields = json.loads(line)
            times = {name: value for name, value in fields.items() if is_time(name) and isinstance(value, int | float)}
            settings = {name: value for name, value in fields.items() if isinstance(value, str | int) and name not in times}
            found += [((json.dumps(settings), name), float(value)) for name, value in times.items()]
    return found


def is_time(name: str) -> bool:
    """Whether a field is a time, not a rate."""
    return name.endswith(TIMES) and "_per_" not in name


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--before", type=Path, required=True, metavar="FOLDER", help="the other checkout, built")
    parser.add_argument("--rounds", type=int, default=3, help="runs in each checkout (default 3)")
    parser.add_argument("--turn-seconds", type=float, default=0.5, metavar="S", help="how long a turn takes (default 0.5)")
    parser.add_argument("benchmark", help="its name in benchmarks/, such as attend")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the benchmark takes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
