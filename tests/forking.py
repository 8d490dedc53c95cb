"""Children that are forked of the tests' own process, or of one of theirs, and what they say."""

import os
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from textwrap import dedent

from tests.waiting import SECONDS_MAX


@contextmanager
def server():
    """A server in a process of its own; its target."""
    command = [sys.executable, "-m", "kvdb", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def status_of(child, seconds_max=SECONDS_MAX):
    """How a child ended: 0 where all went well. One that hangs is killed."""
    ends = time.monotonic() + seconds_max
    while time.monotonic() < ends:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.001)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "none, because it hung"


class Child:
    """A child of this process, which calls a function and ends without a word to anything that its parent has open."""

    def __init__(self, function):
        reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(reading)
            try:
                said = str(function())
            except BaseException:  # noqa: BLE001  # whatever it is, the parent is to hear of it
                said = traceback.format_exc()
            os.write(writing, said.encode())
            os._exit(0)
        os.close(writing)
        self._reading = reading

    def said(self):
        """What the function returned, as text, or what it raised."""
        status = status_of(self.pid)
        with os.fdopen(self._reading) as pipe:
            return pipe.read() or f"nothing; it ended with {status}"


def in_child(function):
    """What a function returns in a child of this process, as text, or what it raises."""
    return Child(function).said()


def play(script, *arguments):
    """Run a script in a process of its own, which may fork. Returns what it says; its errors and its own end fail the test."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", dedent(script), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout
