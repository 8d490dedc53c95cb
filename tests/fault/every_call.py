"""Kills a process that uses a store at each of its writes, syncs and renames, or lets that call fail, or a read; strace does it.

python -m tests.fault.every_call --fault KILL
python -m tests.fault.every_call --fault EIO --every 3
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from signal import SIGKILL

from tests.fault.few_calls import BEFORE, SEED
from tests.fault.kill import Told
from tests.fault.processes import Processes
from tests.fault.story import carry_out, open_store

WRITES = (
    "pwritev",
    "pwritev2",
    "pwrite64",
    "write",
    "fsync",
    "fdatasync",
    "rename",
    "unlink",
    "ftruncate",
    "fallocate",
    "mkdir",
    "removexattr",
)
"""The system calls that change files. Calls of each are counted apart, and those of each thread."""
READS = ("preadv", "preadv2", "pread64", "read")
FAULTS = {"KILL": WRITES, "EIO": WRITES, "ENOSPC": WRITES, "EIO-READ": READS}
EFFECTS = {"KILL": "signal=KILL", "EIO": "error=EIO", "ENOSPC": "error=ENOSPC", "EIO-READ": "error=EIO"}
SYNC = re.compile(r"f(?:data)?sync\(\d+<(?P<path>[^>]*)>\) += (?P<result>0|-1)")


class NotTraced(Exception):
    """Processes cannot be traced here, as in many containers."""


class Tracer:
    """Lets system calls of processes fail that use a store. root: an empty folder for stores."""

    def __init__(self, root, processes, writer="good"):
        self._root, self._processes, self._writer = root, processes, writer
        self._go, self._trace = root / "go", root / "trace"
        os.mkfifo(self._go)
        with open_store(root / "good") as db:
            for step in BEFORE:
                carry_out(db, SEED, step, "durable")

    def run(self, fault, call, number):
        """Do the calls on a copy of the store, with the `number`-th of one system call at fault. Returns whether there were so
        many. Raises AssertionError for what is lost, wrong or half there, and for an error that is not kvdb's, and NotTraced."""
        folder, where = self._root / "changed", f"{fault} at {call} {number}"
        shutil.copytree(self._root / "good", folder)
        child, said = self._processes.start(self._go, folder, self._writer)
        with said, attached(child, self._trace, f"trace={call}", f"inject={call}:{EFFECTS[fault]}:when={number}") as tracer:
            self._go.write_bytes(b"")
            lines = said.read().splitlines(keepends=True)
            ended = self._processes.ended()
            tracer.wait()
        trace = self._trace.read_text()
        met = "(INJECTED)" in trace or ended == -SIGKILL
        told = Told()
        told.read(SEED, [f"did {step}" for step in BEFORE])
        if not met:
            assert ended == 0, f"{where}: it ended with {ended}"
        elif not (fault != "KILL" and call in {"write", "read"}):  # where saying what was done may fail, or an import
            assert ended == (-SIGKILL if fault == "KILL" else 0), f"{where}: it ended with {ended}"
        _check_syncs(trace, where)
        told.read(SEED, [line for line in lines if line.endswith("\n")])
        told.check(folder, where)
        shutil.rmtree(folder)
        return met


def attached(child, trace, *expressions):
    """strace, once it is attached to a process. trace: the file it writes. expressions: what it traces and injects. Raises
    NotTraced, and kills the process, where it cannot be."""
    options = [word for expression in expressions for word in ("-e", expression)]
    tracer = subprocess.Popen(
        ["strace", "-f", "-y", "-o", str(trace), *options, "-p", str(child)], stderr=subprocess.PIPE, text=True
    )
    said = tracer.stderr.readline()
    if "attached" not in said:
        os.kill(child, SIGKILL)
        tracer.wait()
        raise NotTraced(said.strip())
    return tracer


def _check_syncs(trace, where):
    """A segment whose sync failed is given up: no second sync says that it is on the disk after all."""
    failed = set()
    for sync in SYNC.finditer(trace):
        if sync["path"].endswith(".segment"):
            assert sync["path"] not in failed, f"{where}: {sync['path']} is synced again"
            if sync["result"] == "-1":
                failed.add(sync["path"])


def run_all(fault, every=1, calls=None, writer="good"):
    """The number of faults that were met, by system call. Raises as `Tracer.run` does."""
    met = Counter()
    with tempfile.TemporaryDirectory() as name, Processes("tests.fault.few_calls", heard=False) as processes:
        tracer = Tracer(Path(name), processes, writer)
        for call in calls or FAULTS[fault]:
            number = 1
            while tracer.run(fault, call, number):
                met[call] += 1
                number += every
    return met


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", choices=FAULTS, default="KILL")
    parser.add_argument("--every", type=int, default=1, help="only every such call")
    parser.add_argument("--calls", nargs="*", help="the system calls")
    parser.add_argument("--writer", choices=("good", "retrying"), default="good")
    given = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit("tests.fault.every_call needs strace, which is not installed")
    try:
        met = run_all(given.fault, given.every, given.calls, given.writer)
    except NotTraced as reason:
        sys.exit(f"tests.fault.every_call cannot trace here: {reason}")
    sys.stdout.write(f"{met.total()} faults, {given.fault} at {', '.join(f'{n} {call}' for call, n in met.items())}: ")
    sys.stdout.write("nothing lost, wrong or half there\n")


if __name__ == "__main__":
    main()
