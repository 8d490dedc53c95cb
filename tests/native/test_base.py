"""The library under both extension modules: one pool, one choice of instruction set, whoever asks."""

import os
import subprocess
import sys

import pytest

import indexes._native as index_native
import kvdb._native as kvdb_native


def run(script, **environment):
    return subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )


CALLS = """
import os, threading
import numpy as np
import indexes._native as index_native
import kvdb._native as kvdb_native
from indexes.base import Queries
from indexes.blocks import Blocks

k = np.random.default_rng(0).standard_normal((4, 4096, 64)).astype(np.float32)
blocks = Blocks.of(k, k, 64)
queries = Queries.of(k[:, :1], 4, 0.125, 4096)
offsets = np.arange(5, dtype=np.int64) * 4096
ids = np.tile(np.arange(4096, dtype=np.int32), 4)
geometry = kvdb_native.Geometry(kvdb_native.Dtype.float32, 4, 64)
counts = np.full(64, 64, np.int32)

def score():
    scores = np.empty(len(ids), np.float32)
    index_native.score(blocks.native, queries.native, offsets, ids, scores)

def attend():
    kvdb_native.attend(geometry, k[:, :1], blocks.table, counts, 0, 0.125, np.empty_like(k[:, :1]))

def threads():
    return len(os.listdir("/proc/self/task"))

def in_background():
    kvdb_native.work_in_background()
    score(), attend()

"""


def test_settings_are_those_of_the_process():
    before, spin, isa = kvdb_native.threads(), kvdb_native.spin_us(), kvdb_native.isa()
    try:
        kvdb_native.set_threads(3)
        index_native.set_spin_us(7)
        index_native.set_isa("portable")
        assert (index_native.threads(), kvdb_native.spin_us(), kvdb_native.isa()) == (3, 7, "portable")
    finally:
        kvdb_native.set_threads(before)
        kvdb_native.set_spin_us(spin)
        kvdb_native.set_isa(isa)


@pytest.mark.parametrize("us", [-1, 1_000_001])
def test_a_wrong_spin_is_refused(us):
    with pytest.raises(ValueError, match=f"spin is {us}; expected 0 to 1000000"):
        kvdb_native.set_spin_us(us)


@pytest.mark.parametrize("spin", [0, 20])
def test_a_pool_that_spins_shortly_or_not_at_all_answers(spin):
    script = f"{CALLS}kvdb_native.set_spin_us({spin})\nfor _ in range(50): attend(), score()"
    done = run(script, KVDB_THREADS="4")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads as Linux shows them")
def test_both_modules_share_one_pool_and_one_for_the_background():
    count = (
        "alone = threads()\nscore(), attend()\nforeground = threads() - alone\n"
        "def background(): in_background(); print(foreground, threads() - alone - foreground - 1)\n"
        "worker = threading.Thread(target=background)\nworker.start(), worker.join()"
    )
    done = run(CALLS + count, KVDB_THREADS="4", OPENBLAS_NUM_THREADS="1")
    assert done.stdout.split() == ["3", "3"], done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_both_pools_anew():
    fork = (
        "score(), attend()\nworker = threading.Thread(target=in_background)\nworker.start(), worker.join()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    score(), attend()\n"
        "    worker = threading.Thread(target=in_background)\n"
        "    worker.start(), worker.join()\n"
        "    os._exit(0)\n"
        "attend()\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    done = run("import warnings; warnings.simplefilter('ignore')\n" + CALLS + fork, KVDB_THREADS="4")
    assert done.stdout.strip() == "0", done.stderr


def test_a_process_ends_while_its_workers_spin_or_sleep():
    done = run(CALLS + "kvdb_native.set_spin_us(1_000_000)\nattend()", KVDB_THREADS="4")
    assert (done.returncode, done.stderr) == (0, "")
    daemon = "threading.Thread(target=lambda: [attend() for _ in iter(int, 1)], daemon=True).start()\nattend()"
    done = run(CALLS + daemon, KVDB_THREADS="4")
    assert done.returncode == 0, done.stderr


def test_native_objects_go_even_where_something_keeps_their_owner_for_ever():
    keep = (
        "import ctypes\nfrom kvdb.storage.block_layout import BlockLayout\n"
        "layout = BlockLayout('float32', 2, 8, 4)\nlayout.native\nctypes.pythonapi.Py_IncRef(ctypes.py_object(layout))"
    )
    done = run(keep)
    assert (done.returncode, done.stderr) == (0, "")
