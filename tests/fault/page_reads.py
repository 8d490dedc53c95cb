"""Lets reads of pages fail while a session is asked whose context does not fit into memory; strace does it.

python -m tests.fault.page_reads --every 1

Reads are those of `pread64`, as the kernel is said to have no io_uring. The first of each thread is let fail, the second, and so
on, until there is none, and then the same with all behind it.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path

import numpy as np

from tests.fault.every_call import NotTraced, attached
from tests.fault.paged_session import fill
from tests.fault.processes import Processes

FAILED = "EIO (Input/output error) (INJECTED)"


class Tracer:
    """Lets reads fail of processes that are forked. root: a folder for the store and what is said of it."""

    def __init__(self, root, processes):
        self._root = root
        self._processes = processes
        os.mkfifo(root / "go")
        np.save(root / "right.npy", fill(root / "store"))

    def run(self, number):
        """Let the reads of a number fail, of each thread's; it may be strace's "1+", for all from the first on. Returns how many
        answers were right, how many refused, and how many reads failed, which may be none. Raises AssertionError for a wrong
        answer, for an error that does not say what it is, and for a store that does not go on when reads succeed again;
        NotTraced where strace cannot do it."""
        go, trace = self._root / "go", self._root / "trace"
        child, said = self._processes.start(go, self._root / "store")
        faults = ("trace=io_uring_setup,pread64", "inject=io_uring_setup:error=ENOSYS", f"inject=pread64:error=EIO:when={number}")
        with said:
            assert said.readline() == "opened\n"  # what reads the catalogue is not what is to fail
            with attached(child, trace, *faults) as tracer:
                go.write_bytes(b"")
                lines = [line.strip() for line in takewhile(lambda line: line != "asked\n", said)]
                tracer.terminate()  # reads succeed from here on
            go.write_bytes(b"")
            after = said.read().split()
        ended = self._processes.ended()
        failed = trace.read_text().count(FAILED)
        assert set(lines) <= {"right", "refused"}, f"read {number}: {lines}"
        assert (after, ended) == (["good", "good", "closed"], 0), f"read {number}: {after}, it ended with {ended}"
        assert ("refused" in lines) <= (failed > 0), f"read {number}: refused itself"
        return Counter(lines, failed=failed)


@contextmanager
def tracing():
    """A Tracer of a store of its own."""
    with tempfile.TemporaryDirectory() as name, Processes("tests.fault.paged_session") as processes:
        yield Tracer(Path(name), processes)


def run_all(every=1):
    """What `Tracer.run` returns, in all, for every such read until there is none."""
    outcomes = Counter()
    with tracing() as tracer:
        for form in ("{}", "{}+"):
            for number in count(1, every):
                met = tracer.run(form.format(number))
                if not met["failed"]:
                    break
                outcomes += met
    return outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="only every such read")
    given = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit("tests.fault.page_reads needs strace, which is not installed")
    try:
        met = run_all(given.every)
    except NotTraced as reason:
        sys.exit(f"tests.fault.page_reads cannot trace here: {reason}")
    sys.stdout.write(
        f"{met['failed']} reads failed, {met['refused']} answers refused, {met['right']} right: none wrong, and each "
    )
    sys.stdout.write("session went on when reads succeeded again\n")


if __name__ == "__main__":
    main()
