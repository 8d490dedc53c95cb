"""Plays every fault at length, and writes docs/reliability.md.

python -m tests.fault.report --kills 1000 --flips 10000 --cuts 500 --seed 1

It plays one piece after the other, each with a seed of its own, and notes in a file what came of each. Pieces that are noted
there are not played again, so that it goes on where it was stopped, and several may play different ones at once (--only).
"""

import argparse
import json
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tests.fault.every_call import FAULTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
PIECES = ROOT / "build" / "fault.jsonl"
HEAD = """# What was tried to lose data, and what was lost

`make fault` writes this page: it plays the faults below on a store, or forks processes, and compares what is there \
afterwards with what was acknowledged. Every piece has a seed, with which it can be played again.

| fault | how | what came of it | kvdb |
|---|---|---|---|
"""
CONTROL = "caught, as it must be"

CAUGHT = ("AssertionError", "kvdb.errors.IntegrityError")
"""How the harness ends when it finds something wrong."""


class Piece(NamedTuple):
    """A run of one harness. name: of the fault. arguments: the harness, and its own."""

    name: str
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, name, *arguments):
        return cls(name, tuple(map(str, arguments)))

    @property
    def command(self):
        return f"python -m tests.fault.{shlex.join(self.arguments)}"

    def play(self):
        """Run the harness. Returns what the page says of it, with a mark where it found something wrong."""
        command = [sys.executable, "-m", f"tests.fault.{self.arguments[0]}", *self.arguments[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["nothing"]
        if "control" in self.name and done.returncode and said[-1].startswith(CAUGHT):
            return CONTROL
        if done.returncode == 0 and "control" not in self.name:
            return "; ".join(said)
        if "cannot" in said[-1] or "needs strace" in said[-1]:
            return f"not played here: {said[-1]}"
        told = PIECES.with_name(f"fault-{re.sub(r'[^a-z0-9]+', '-', ' '.join(self.arguments))}.log")
        told.write_text(done.stdout + done.stderr)
        return f"**FAILED**: {next((line for line in reversed(said) if 'Error' in line), said[-1])}; {told} has all of it"


def _seeded(name, harness, option, count, most, seed, *arguments):
    """Pieces of at most `most`, `count` in all."""
    for number in range(-(-count // most)):
        here = min(most, count - number * most)
        yield Piece.of(name, harness, option, here, "--seed", seed + number, *arguments)


def pieces(given):
    """Everything that is played."""
    kills, cuts, seed = given.kills, given.cuts, given.seed
    narrow = "--limits", "narrow"
    yield from _seeded("kill -9 at any moment", "kill", "--kills", kills - kills // 4, 100, seed, "--durability", "durable")
    some = kills // 4, 100, seed + 100
    yield from _seeded("kill -9 at any moment, no room", "kill", "--kills", *some, "--durability", "durable", *narrow)
    for durability in ("os", "memory"):
        few = max(1, kills // 10), 100, seed
        yield from _seeded(f"kill -9 at any moment, `{durability}`", "kill", "--kills", *few, "--durability", durability)
    yield from _seeded("power cut at any moment", "power", "--cuts", cuts, 50, seed, "--durability", "durable")
    few = max(1, cuts // 10), 50, seed
    yield from _seeded("power cut at any moment, `os`", "power", "--cuts", *few, "--durability", "os")
    control = "power cut at any moment, of a writer that syncs no file (control)"
    yield Piece.of(control, "power", "--cuts", 10, "--seed", seed, "--durability", "broken")
    yield from _seeded("single bits changed, files cut short", "flips", "--flips", given.flips, 1000, seed)
    yield from _seeded(
        "any order of calls, ends and kills beside a dictionary", "any_order", "--examples", given.examples, 100, seed
    )
    name = "lock files removed, two writers, older catalogues, backups copied, linked and damaged"
    yield from _seeded(name, "mistakes", "--stores", given.stores, 100, seed)
    for fault, calls in FAULTS.items():
        for call in calls:
            yield Piece.of(
                f"{fault} at each such system call", "every_call", "--fault", fault, "--every", given.every, "--calls", call
            )
    yield Piece.of("EIO at each read of a page while a session is asked", "page_reads", "--every", given.every)
    retrying = "a sync that failed is tried again and its second answer believed (control)"
    yield Piece.of(retrying, "every_call", "--fault", "EIO", "--calls", "fsync", "--writer", "retrying")
    yield Piece.of("a disk that is full at any point of any call", "no_room", "--every", 8192 * given.every)
    yield from _seeded("forks while threads of the parent ask", "forks", "--forks", given.forks, 100, seed)
    yield Piece.of("a full disk, one that is read-only, few open files", "limits")


def revision():
    """The commit that is played, with a + where files but this page differ from it."""

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

    changed = git("diff", "--quiet", "HEAD", "--", ".", ":!docs").returncode
    return (git("rev-parse", "--short", "HEAD").stdout.strip() or "unknown") + "+" * bool(changed)


def noted(path):
    """What came of the pieces that were played before, by command."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["command"]: line for line in map(json.loads, lines)}


def note(path, piece):
    """Play a piece, and note what came of it, which is returned."""
    outcome = piece.play()
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    line = {"command": piece.command, "outcome": outcome, "revision": revision(), "day": f"{datetime.now(UTC):%Y-%m-%d}"}
    with path.open("a") as file:
        file.write(json.dumps({**line, "system": system}) + "\n")
    return outcome


def page(plan, played):
    """The text of the page."""
    rows = [(piece.name, played[piece.command]) for piece in plan if piece.command in played]
    lines = [f"| {name} | `{one['command']}` | {one['outcome']} | {one['revision']}, {one['day']} |" for name, one in rows]
    missing = [piece.command for piece in plan if piece.command not in played]
    left = "".join(f"\nNot played: `{command}`." for command in missing)
    systems = sorted({one["system"] for _, one in rows})
    return HEAD + "\n".join(lines) + f"\n{left}\nPlayed on {', '.join(systems)}.\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--cuts", type=int, default=500)
    parser.add_argument("--examples", type=int, default=500, help="stores that are used in any order")
    parser.add_argument("--stores", type=int, default=200, help="with which each mistake is made")
    parser.add_argument("--forks", type=int, default=200, help="children of processes that use a database")
    parser.add_argument("--every", type=int, default=1, help="only every such system call")
    parser.add_argument("--seed", type=int, default=1, help="of the first piece")
    parser.add_argument("--pieces", type=Path, default=PIECES, help="where what was played is noted")
    parser.add_argument(
        "--only", nargs="*", help="play only harnesses or faults of these names; the page is written of all that were played"
    )
    given = parser.parse_args()
    plan = list(pieces(given))
    given.pieces.parent.mkdir(exist_ok=True)
    for piece in plan:
        if piece.command in noted(given.pieces) or (given.only is not None and not {*given.only} & {*piece.arguments}):
            continue
        outcome = note(given.pieces, piece)
        sys.stdout.write(f"{piece.name}: {outcome}\n")
        sys.stdout.flush()
    played = noted(given.pieces)
    PAGE.write_text(page(plan, played))
    sys.exit(int(any("FAILED" in played[piece.command]["outcome"] for piece in plan if piece.command in played)))


if __name__ == "__main__":
    main()
