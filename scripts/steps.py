"""Runs commands at once, says how far each is, and how long the set-up has taken so far.

    python3 scripts/steps.py "compiling the kernels" "cmake --build build" "installing the libraries" "pip install -r all.txt"

On a terminal there is one line that changes; elsewhere a line when a step begins, ends, or has come further. What a command
prints is shown only if it fails, and the others are ended then. KVDB_STARTED: when the set-up began, in seconds since the epoch.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from threading import Thread

LOOK_SECONDS = 0.2
SAY_SECONDS = 10
STARTED = float(os.environ.get("KVDB_STARTED") or time.time())
DETAILS = (
    (re.compile(r"\[(\d+)/(\d+)\]"), "{0} of {1}"),
    (re.compile(r"^\s*Building wheel for ([\w.-]+)"), "building {0}"),
    (re.compile(r"^\s*(?:Downloading|Using cached|Collecting|Processing) (?:\S*/)?([\w.]+)"), "{0}"),
    (re.compile(r"^\s*Installing collected packages: (.*)"), "unpacking {0}"),
)
"""What a line of ninja or pip says of how far it is, and how that is shown."""


class Step:
    """A command under way. detail: how far it is, by what it printed last."""

    def __init__(self, label: str, command: str) -> None:
        self.label, self.detail, self.said = label, "", ""
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            ["/bin/bash", "-euo", "pipefail", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            for pattern, shown in DETAILS:
                if match := pattern.search(line):
                    self.detail = shown.format(*match.groups())

    @property
    def status(self) -> int | None:
        """The exit status, None as long as the command goes on."""
        status = self.process.poll()
        if status is not None:
            self._reader.join()
        return status

    def end(self) -> None:
        """End the command and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()

    def __str__(self) -> str:
        return f"{self.label}: {self.detail}" if self.detail else self.label


def say(text: str, *, passing: bool = False) -> None:
    """A line with the time in front; a passing one is written over by the next."""
    line = f"kvdb: {time.time() - STARTED:4.0f} s  {text}"
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{line[:width] if passing else line:<{width}}", end="" if passing else "\n", flush=True)
    elif not passing:
        print(line[:120], flush=True)


def watch(steps: list[Step]) -> int:
    """Until all have ended, or one has failed: its exit status."""
    looked = time.monotonic()
    while steps:
        for step in [step for step in steps if step.status is not None]:
            steps.remove(step)
            if step.status:
                say(f"{step.label} failed")
                sys.stderr.write("".join(step.lines))
                return step.status
            say(f"{step.label}: done")
        if steps:
            say(", ".join(map(str, steps)), passing=True)
        if time.monotonic() - looked > SAY_SECONDS:
            looked = time.monotonic()
            for step in steps:
                if step.detail != step.said and not sys.stdout.isatty():
                    say(str(step))
                    step.said = step.detail
        time.sleep(LOOK_SECONDS)
    return 0


def main(arguments: list[str]) -> int:
    labels, commands = arguments[::2], arguments[1::2]
    for label in labels:
        say(label)
    steps = [Step(label, command) for label, command in zip(labels, commands, strict=True)]
    under_way = list(steps)
    try:
        return watch(under_way)
    finally:
        for step in steps:
            step.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
