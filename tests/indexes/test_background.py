"""Threads that work in the background have helpers of their own, which give way as they do."""

import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import indexes._native as _native
from indexes.blocks import Blocks
from indexes.flat import Flat

NICE = 7


def nice_threads():
    """The numbers of this process's threads that give way so much."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(task.name) for task in tasks if os.getpriority(os.PRIO_PROCESS, int(task.name)) == NICE}


@pytest.mark.skipif(sys.platform != "linux" or _native.threads() == 1, reason="needs priorities of threads, and two of them")
def test_helpers_have_the_priority_of_those_who_call_in_the_background():
    k = np.random.default_rng(0).standard_normal((2, 20_000, 64)).astype(np.float32)
    blocks = Blocks.of(k)
    helpers = []

    def work():
        _native.work_in_background()
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        Flat.build(blocks)
        helpers.append(nice_threads() - {threading.get_native_id()})

    before = nice_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert helpers[0] - before
    Flat.build(blocks)  # in the foreground, with helpers of its own
    assert nice_threads() == helpers[0]
