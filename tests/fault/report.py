"""Plays every fault at length, and writes docs/reliability.md.

python -m tests.fault.report --kills 1000 --flips 10000 --cuts 500 --seed 1
"""

import argparse
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
HEAD = """# What was tried to lose data, and what was lost

`make fault` writes this page: it plays the faults below on a store and compares what is there afterwards with what was \
acknowledged. Every run has a seed, with which it can be played again.

| fault | how | what came of it |
|---|---|---|
"""
CONTROL = "caught, as it must be: the writer's contexts were lost, and the harness said so"

CAUGHT = ("AssertionError", "kvdb.errors.IntegrityError")
"""How the harness ends when it finds something wrong."""


def runs(given):
    """The faults: a name, and the command that plays it."""
    seed = ["--seed", given.seed]
    for durability in ("durable", "os", "memory"):
        kills = given.kills if durability == "durable" else max(1, given.kills // 10)
        yield f"kill -9 at any moment, `{durability}`", ["kill", "--kills", kills, *seed, "--durability", durability]
    for durability in ("durable", "os"):
        cuts = given.cuts if durability == "durable" else max(1, given.cuts // 10)
        yield f"power cut at any moment, `{durability}`", ["power", "--cuts", cuts, *seed, "--durability", durability]
    yield "power cuts of a writer that syncs no file (control)", ["power", "--cuts", 10, *seed, "--durability", "broken"]
    yield "single bits changed, files cut short", ["flips", "--flips", given.flips, *seed]
    for fault in ("KILL", "EIO", "ENOSPC"):
        yield f"{fault} at each system call that changes files", ["every_call", "--fault", fault, "--every", given.every]
    yield "a full disk, one that is read-only, few open files", ["limits"]


def play(arguments):
    """Run one harness. Returns whether it found nothing wrong, and what it said last."""
    command = [sys.executable, "-m", f"tests.fault.{arguments[0]}", *map(str, arguments[1:])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["nothing"]
    return done.returncode == 0, "; ".join(said) if done.returncode == 0 else said[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--cuts", type=int, default=500)
    parser.add_argument("--every", type=int, default=1, help="only every such system call")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    lines, wrong = [], 0
    for name, arguments in runs(given):
        fine, said = play(arguments)
        if "control" in name:
            fine = said.startswith(CAUGHT)
            said = CONTROL if fine else said
        skipped = "cannot" in said or "needs strace" in said
        wrong += not fine and not skipped
        outcome = said if fine else f"not played here: {said}" if skipped else f"**FAILED**: {said}"
        lines.append(f"| {name} | `python -m tests.fault.{shlex.join(map(str, arguments))}` | {outcome} |")
        sys.stdout.write(f"{name}: {outcome}\n")
        sys.stdout.flush()
    when = f"\nPlayed on {datetime.now(UTC):%Y-%m-%d}, Linux {platform.release()}, Python {platform.python_version()}.\n"
    PAGE.write_text(HEAD + "\n".join(lines) + "\n" + when)
    sys.exit(int(bool(wrong)))


if __name__ == "__main__":
    main()
