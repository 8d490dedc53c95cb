"""The priority of threads whose work nobody waits for."""

import os
import sys
from contextlib import suppress
from threading import get_native_id

import indexes._native as _native

NICE = 10
"""How much nicer than its process such a thread is; the scheduler then gives it about a tenth of what it gives others."""
NICEST = 19
"""Which leaves it what nobody else wants, and a hundredth."""


def work_in_background(nice: int = NICE) -> None:
    """Lower the priority of this thread and those that it starts by `nice`, where the system allows it."""
    _native.work_in_background()
    if sys.platform == "linux":  # elsewhere, a priority belongs to the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + nice)
