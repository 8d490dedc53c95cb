"""Threads that work in the background have helpers of their own, which give way as they do."""

import subprocess
import sys

import pytest

CODE = """
import os, threading
import numpy as np
import indexes._native as _native
from indexes.blocks import Blocks
from indexes.flat import Flat

def priorities(ended=None):
    tasks = {int(task) for task in os.listdir("/proc/self/task")} - {ended}  # for Python, and soon for the system
    return sorted(os.getpriority(os.PRIO_PROCESS, task) for task in tasks)

def work():
    _native.work_in_background()
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
    Flat.build(blocks)

blocks = Blocks.of(np.random.default_rng(0).standard_normal((2, 20_000, 64)).astype(np.float32))
_native.set_threads(2)
before = priorities()
thread = threading.Thread(target=work)
thread.start()
thread.join()
helped = priorities(thread.native_id)
Flat.build(blocks)
print(before.count(7), helped.count(7) - before.count(7), len(helped) - len(before), end=" ")
after = priorities(thread.native_id)
print(after.count(7) - helped.count(7), len(after) - len(helped))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there threads have priorities of their own")
def test_helpers_have_the_priority_of_those_who_call_in_the_background():
    """One helper stays behind, which gives way; the foreground then starts one of its own, which does not."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "1", "0", "1"]
