"""One question in a process of its own: what it says on the way is passed on, and it is stopped when its time is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import IO

GRACE_SECONDS = 3.0
KEPT_LINES = 40


@dataclass(frozen=True)
class Outcome:
    """status: done, failed or out of time. error: the last thing that it said, where it is not done."""

    status: str
    seconds: float
    error: str = ""


def supervise(command: Sequence[str], seconds_max: float, also: Mapping[str, str] | None = None) -> Outcome:
    """Run it. Processes that it starts are stopped with it. also: of its environment, beside what this process has."""
    started = time.monotonic()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(also or {})
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace", env=environment, process_group=0)
    said: deque[str] = deque(maxlen=KEPT_LINES)
    assert process.stderr is not None
    listening = Thread(target=_pass_on, args=(process.stderr, said), daemon=True)
    listening.start()
    try:
        code = process.wait(seconds_max)
    except subprocess.TimeoutExpired:
        return Outcome("out of time", time.monotonic() - started, f"stopped after {seconds_max:.0f} s")
    finally:
        if process.poll() is None:  # and so is still the leader of its group; one that waits for a kernel hears nothing less
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        listening.join(GRACE_SECONDS)
    seconds = time.monotonic() - started
    if code == 0:
        return Outcome("done", seconds)
    last = next((line for line in reversed(said) if line.strip()), "")
    return Outcome("failed", seconds, last.strip() or f"exit status {code}")


def _pass_on(stream: IO[str], said: deque[str]) -> None:
    with stream:
        for line in stream:
            said.append(line)
            sys.stderr.write(line)
            sys.stderr.flush()
