"""Is one checkout slower than another? A benchmark runs in both in turns, each time in a process of its own.

    python -m benchmarks.turns --before ../other --rounds 3 embedded
    python -m benchmarks.turns --before ../other retrieve --quick --tokens 16384

What follows the benchmark's name goes to it. One JSON line for each figure that both print: medians over the rounds, and after
over before; a last line has the median ratio of each field. A checkout's own `.venv` runs it, if it has one.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.harness import report

TIMES = ("_ns", "_us", "_ms", "_s", "seconds")
"""Endings of the fields that are compared: times, of which less is better."""
Key = tuple[str, str]
"""A line's settings, as JSON, and the name of one of its figures."""


def main() -> int:
    given = arguments()
    checkouts = {"before": given.before.resolve(), "after": Path.cwd()}
    seen: dict[str, dict[Key, list[float]]] = {side: defaultdict(list) for side in checkouts}
    for number in range(given.rounds):
        order = list(checkouts) if number % 2 == 0 else list(checkouts)[::-1]  # who goes first finds a cooler machine
        for side in order:
            for key, value in run(checkouts[side], given.benchmark, given.arguments):
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


def run(checkout: Path, benchmark: str, arguments: list[str]) -> list[tuple[Key, float]]:
    """The figures of one run in a checkout. Raises CalledProcessError where it fails."""
    python = checkout / ".venv/bin/python"
    command = [str(python) if python.exists() else sys.executable, "-m", f"benchmarks.{benchmark}", *arguments]
    done = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    figures = []
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            fields = json.loads(line)
            times = {name: value for name, value in fields.items() if name.endswith(TIMES) and isinstance(value, int | float)}
            settings = {name: value for name, value in fields.items() if isinstance(value, str | int) and name not in times}
            figures += [((json.dumps(settings), name), float(value)) for name, value in times.items()]
    return figures


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="FOLDER", help="the other checkout, built")
    parser.add_argument("--rounds", type=int, default=3, help="runs in each checkout (default 3)")
    parser.add_argument("benchmark", help="its name in benchmarks/, such as attend")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the benchmark takes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
