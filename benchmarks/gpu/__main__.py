"""All that is asked of a card, in one call: is every result right, and how fast is it?

    python -m benchmarks.gpu [--only decode dipr] [--json FILE] [--seconds 470] [--seed N] [--small]

One JSON line a measurement, into FILE as well, and a table at the end. Each question first checks its results, on fresh random
data, against float64; what the kernels write is poisoned before. Each runs in a process of its own, so that one that fails or
hangs takes nothing with it; the exit status is then 1. Without a card everything runs under Triton's interpreter at small sizes,
and no time is printed or written. A plain checkout does, with torch, Triton, numpy and ml-dtypes; what needs kvdb's compiled
kernels says so and is left out.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from pathlib import Path

from benchmarks.gpu import checkout, results
from benchmarks.gpu.results import Results
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.supervise import Outcome, supervise

DEFAULT_JSON = Path("build/benchmarks-gpu.jsonl")
SECONDS_LEAST = 5.0
"""A question is not begun with less time than that."""
NO_CARD = """\
No card was found. All of this ran under Triton's interpreter on the CPU, at small sizes: the results are right where no line says
otherwise, and nothing here says how fast anything is on a card."""


def main() -> None:
    given = arguments()
    if given.section:
        answer(given)
        return
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text("")
    failed = ask(given)
    rows = results.read(given.json)
    print("\n" + results.table(rows))
    if any(row["benchmark"] == "gpu.machine" and row["card"] is None for row in rows):
        print("\n" + NO_CARD)
    if failed:
        print(f"\nFAILED: {', '.join(failed)}", file=sys.stderr)
    sys.exit(1 if failed else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(SECTIONS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="questions to ask (default: all)")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="where the lines go (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=470.0, help="for everything together (default %(default)s)")
    parser.add_argument("--seed", type=int, help="of the random data (default: a new one, which is written down)")
    parser.add_argument("--small", action="store_true", help="on a card, small sizes and no times: does everything run?")
    parser.add_argument("--section", choices=names, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.seed = secrets.randbelow(1 << 31) if given.seed is None else given.seed
    return given


def ask(given: argparse.Namespace) -> list[str]:
    """Every question in turn. Returns those that failed."""
    started, failed = time.monotonic(), []
    for name in given.only:
        left = given.seconds - (time.monotonic() - started)
        limit = min(SECTIONS[name].seconds_max, left)
        if limit < SECONDS_LEAST:
            outcome = Outcome("out of time", 0.0, "the time for everything was over")
        else:
            print(f"== {name}: at most {limit:.0f} s, {left:.0f} s are left for everything", file=sys.stderr, flush=True)
            options = ["--json", str(given.json), "--seed", str(given.seed), *(["--small"] if given.small else [])]
            outcome = supervise([sys.executable, "-m", "benchmarks.gpu", "--section", name, *options], limit)
        written = [row for row in results.read(given.json) if row["benchmark"] == "gpu.machine"]
        Results(given.json, name, timed=bool(written) and bool(written[0]["timed"])).end(
            outcome.status, outcome.seconds, outcome.error
        )
        if outcome.status != "done":
            failed.append(name)
    return failed


def answer(given: argparse.Namespace) -> None:
    """One question, in this process."""
    compiled = checkout.prepare()
    from benchmarks.gpu.card import Card  # torch, behind the preparation

    card, section = Card(given.small), SECTIONS[given.section]
    if not any(row["benchmark"] == "gpu.machine" for row in results.read(given.json)):
        line = json.dumps({"benchmark": "gpu.machine", **card.describe(), "timed": card.timed, "seed": given.seed})
        print(line, flush=True)
        with given.json.open("a") as file:
            file.write(line + "\n")
    written = Results(given.json, section.name, card.timed)
    if section.compiled and not compiled:
        written.skip("", "kvdb's kernels are not compiled here; make test, or pip install .")
        return
    section.run(card, written, given.seed)


if __name__ == "__main__":
    main()
