"""The pool of threads, by its counters: with more threads than processors, and with more threads than items."""

import os
import subprocess
import sys

import pytest

BLOCKS = 256
CALLS = f"""
import os, time
import numpy as np
import kvdb._native as native
geometry = native.Geometry(native.Dtype.float32, 2, 64, 64)
NBYTES = 2 * 2 * 64 * 64 * 4
memory = np.arange({BLOCKS} * NBYTES, dtype=np.uint8)
table = memory.ctypes.data + np.arange({BLOCKS}, dtype=np.uint64) * np.uint64(NBYTES)
expected = int(np.bitwise_xor.reduce(memory.view(np.uint64)))

def read(blocks={BLOCKS}):
    return native.read_blocks(geometry, table[:blocks])

def counted(calls, blocks={BLOCKS}):
    read(blocks)
    before = np.array(native.pool_counters())
    for _ in range(calls):
        read(blocks)
        time.sleep(0.002)
    return (np.array(native.pool_counters()) - before).T
"""


def run(script, **environment):
    done = subprocess.run(
        [sys.executable, "-c", CALLS + script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("threads", ["2", "8", "128"])
def test_every_item_is_carried_out_once_whatever_the_number_of_threads(threads):
    script = (
        f"assert read() == expected\njobs, items, *_ = counted(20)\nprint(items.sum() == 20 * {BLOCKS}, jobs[0] <= 20, len(jobs))"
    )
    assert run(script, KVDB_THREADS=threads) == ["True", "True", threads]


def test_no_more_workers_are_woken_than_there_are_items():
    """A call of sixteen blocks is worth fifteen of 127 workers at most."""
    script = "jobs, _, woken, _ = counted(50, 16)\nprint(woken.sum() <= 50 * 15, (jobs[16:] == 0).all())"
    assert run(script, KVDB_THREADS="128") == ["True", "True"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a process of one processor")
def test_nobody_spins_where_threads_outnumber_processors():
    """However long threads may spin: with one processor the caller needs it."""
    alone = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    script = "native.set_spin_us(1_000_000)\n*_, caught = counted(50)\nprint(native.usable_cpus(), caught.sum())"
    done = subprocess.run(
        [sys.executable, "-c", alone + CALLS + script],
        env=os.environ | {"KVDB_THREADS": "4"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["1", "0"]
