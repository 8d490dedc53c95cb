"""Kills a process that uses a store at each of its writes, syncs and renames, or lets that call fail; strace does it.

python -m tests.fault.every_call --fault KILL
python -m tests.fault.every_call --fault EIO --every 3
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from signal import SIGKILL

from tests.fault.few_calls import CONTEXTS, KEPT
from tests.stores import connect, holds, names, put

CALLS = ("pwritev", "pwritev2", "pwrite64", "write", "fsync", "fdatasync", "rename", "unlink", "ftruncate", "fallocate", "mkdir")
"""The system calls that change files. Calls of each are counted apart."""
FAULTS = ("KILL", "EIO", "ENOSPC")


class NotTraced(Exception):
    """Processes cannot be traced here, as in many containers."""


def make(folder):
    """A store that holds the context "kept"."""
    with connect(folder) as db:
        put(db, KEPT, "kept")


def run(root, fault, call, number):
    """Do the calls on a copy of the store, with the `number`-th of one system call at fault. Returns whether there were so many.
    Raises AssertionError for what is lost, wrong or half there, and for an error that is not kvdb's."""
    folder = root / "changed"
    shutil.copytree(root / "good", folder)
    effect = f"signal={fault}" if fault == "KILL" else f"error={fault}"
    trace = [
        "strace",
        "-f",
        "-qq",
        "-o",
        str(root / "trace"),
        "-e",
        f"trace={call}",
        "-e",
        f"inject={call}:{effect}:when={number}",
    ]
    command = [*trace, sys.executable, "-B", "-m", "tests.fault.few_calls", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONUNBUFFERED": ""})
    if "strace: " in done.stderr or not (root / "trace").exists():
        raise NotTraced(done.stderr.strip())
    met = "(INJECTED)" in (root / "trace").read_text() or done.returncode in {-SIGKILL, 128 + SIGKILL}
    where = f"{fault} at {call} {number}"
    if fault != "KILL" and not (call == "write" and met):  # saying what was done may fail as well
        assert done.returncode == 0, f"{where}: {done.stderr}"
    _check(folder, done.stdout.splitlines(), where)
    shutil.rmtree(folder)
    return met


def _check(folder, lines, where):
    did = {tuple(line.split()[1:3]) for line in lines if line.startswith("did ")}
    with connect(folder) as db:
        found = names(db)
        for name, tokens in CONTEXTS.items():
            assert name in found or ("put", name) not in did, f"{where}: {name} was acknowledged and is lost"
            assert name not in found or holds(db, tokens), f"{where}: {name} is not found by its tokens"
        dropped = ("drop", "kept") in did
        assert "kept" in found or dropped or len(lines) < 3 or "drop" in lines[-1], f"{where}: a context is lost"
        assert "kept" not in found or (not dropped and holds(db, KEPT)), f"{where}: a context came back"
        db._transport.check_integrity()


def run_all(fault, every=1, calls=CALLS):
    """The number of faults that were met, by system call."""
    met = Counter()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make(root / "good")
        for call in calls:
            number = 1
            while run(root, fault, call, number):
                met[call] += 1
                number += every
    return met


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", choices=FAULTS, default="KILL")
    parser.add_argument("--every", type=int, default=1, help="only every such call")
    given = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit("tests.fault.every_call needs strace, which is not installed")
    met = run_all(given.fault, given.every)
    sys.stdout.write(f"{given.fault} at each of {dict(met)}: nothing lost, wrong or half there\n")


if __name__ == "__main__":
    main()
