"""Waiting for what another thread or process does, without a guess of how long it takes."""

import time

SECONDS_MAX = 20.0


def until(condition, what="it did not happen", *, seconds_max=SECONDS_MAX):
    """Wait until `condition()` is true, and return its value. Fails with `what` after `seconds_max`."""
    deadline = time.monotonic() + seconds_max
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.001)
    return value
