"""A store holds no file of a segment open, however many are in use: 64 descriptors are enough for any number."""

import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.stores import SPEC, connect, holds, put
from tests.waiting import until

MANY = 70
TEXTS = [np.r_[number % 64, number // 64, np.arange(200) % 50] for number in range(MANY)]


def descriptors(store):
    """What this process has open of the store's segments, and how many descriptors it has."""
    links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    there = [os.readlink(link) for link in links if link.is_symlink()]
    return [name for name in there if name.startswith(str(store)) and ".segment" in name], len(there)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to tell the names of open files")
    folder = tmp_path_factory.mktemp("many") / "store"
    with connect(folder) as db:
        for number, tokens in enumerate(TEXTS):
            put(db, tokens, f"c{number}", "os")
    return folder


def test_sessions_over_many_segments_hold_no_file(stored):
    with connect(stored) as db, ExitStack() as sessions:
        assert holds(db, TEXTS[0])
        _, before = descriptors(stored)
        for tokens in TEXTS:
            sessions.enter_context(db.create_session(SPEC, tokens))
        until(lambda: not descriptors(stored)[0], "a file of a segment stays open")
        assert descriptors(stored)[1] - before < 16


def test_segments_that_come_and_go_hold_no_file(stored):
    """The budget is a quarter of what all of them take."""
    with connect(stored, cpu_bytes_max=1 << 20) as db:
        assert holds(db, TEXTS[0])
        _, before = descriptors(stored)
        assert all(holds(db, tokens) for tokens in TEXTS)
        until(lambda: not descriptors(stored)[0], "a file of a segment stays open")
        assert descriptors(stored)[1] - before < 16
