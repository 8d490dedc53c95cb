"""Calls made by several threads that change places after nearly every instruction, so that a race shows at once."""

import sys
import time
from contextlib import contextmanager
from threading import Barrier, Thread

from tests.waiting import SECONDS_MAX

RACE_SECONDS = 0.3
SWITCH_SECONDS = 1e-6


@contextmanager
def switching():
    """Threads take turns after every microsecond while the body runs."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def race(*calls, seconds=RACE_SECONDS):
    """Make each of the calls over and over, in a thread of its own, until the time is over or one raises, which is raised.

    seconds: 0 for a single time.
    """
    raised, started = [], Barrier(len(calls))

    def repeat(call):
        started.wait(SECONDS_MAX)
        deadline = time.monotonic() + seconds
        try:
            call()
            while not raised and time.monotonic() < deadline:
                call()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the test is to hear of it
            raised.append(error)

    threads = [Thread(target=repeat, args=(call,), daemon=True) for call in calls]
    with switching():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS_MAX)
    assert not any(thread.is_alive() for thread in threads), "a call did not return"
    if raised:
        raise raised[0]
