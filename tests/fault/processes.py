"""Processes that are forked by one that has everything imported, as a start takes longer than all that they do."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def fork_for_each_line(use):
    """Read lines of a FIFO and words, fork a process for each, which calls `use` with the words, and say how it ended. What it
    says goes to the FIFO, its number first."""
    for line in sys.stdin:
        fifo, *words = line.split()
        child = os.fork()
        if not child:
            os.dup2(os.open(fifo, os.O_WRONLY), sys.stdout.fileno())
            say(os.getpid())
            use(*words)
            os._exit(0)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


class Processes:
    """The processes of a module that calls `fork_for_each_line`, one at a time. folder: of theirs, for what they need."""

    def __init__(self, module, *, heard=True):
        """heard: whether to show what they say of errors."""
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        self._fifo = self.folder / "said"
        os.mkfifo(self._fifo)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # who forks has no other threads
        errors, pipe = None if heard else subprocess.DEVNULL, subprocess.PIPE
        command = [sys.executable, "-m", module]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, bufsize=1, env=environment)

    def start(self, *words):
        """Start a process. Returns its number, and a file of what it says, which the caller closes."""
        self._process.stdin.write(" ".join(map(str, (self._fifo, *words))) + "\n")
        said = self._fifo.open()
        return int(said.readline()), said

    def ended(self):
        """How the process ended that was started last: its exit status, or a signal's number with a minus."""
        return int(self._process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._temporary.cleanup()
