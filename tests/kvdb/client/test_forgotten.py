"""Sessions that a program forgets are closed when Python collects them."""

import gc
import subprocess
import sys
import threading
from textwrap import dedent

import numpy as np

from kvdb.client.forgotten import CLOSER


def ones(heads):
    return np.ones((heads, 1, 16), np.float32)


class Last:
    """Is closed after all that were forgotten before it."""

    def __init__(self):
        self.closed = threading.Event()

    def close(self):
        self.closed.set()


def wait_for_the_closer():
    gc.collect()
    last = Last()
    handle = type("Handle", (), {})()
    CLOSER.close_with(handle, last)
    del handle
    assert last.closed.wait(20)


def test_a_forgotten_session_gives_its_blocks_back(db, engine, spec):
    for _ in range(3):
        session = db.create_session(spec, [1])
        session.attend(0, ones(4), ones(2), ones(2))
    assert sum(tier.blocks_used for tier in engine.tiers())
    del session
    wait_for_the_closer()
    assert not sum(tier.blocks_used for tier in engine.tiers())


def test_a_session_in_a_cycle_is_found_too(db, engine, spec):
    session = db.create_session(spec, [1])
    session.update(0, ones(2), ones(2))
    session.fork().itself = [session]
    session.itself = session
    del session
    wait_for_the_closer()
    assert not sum(tier.blocks_used for tier in engine.tiers())


def test_a_session_that_is_held_stays_open(db, spec):
    with db.create_session(spec, [1]) as session:
        twin = session.fork()
        twin.update(0, ones(2), ones(2))
        del twin
        wait_for_the_closer()
        session.update(0, ones(2), ones(2))
        assert session.stats().tail_tokens == 0  # of the layer that holds the fewest


ENDS = """
    import sys, threading, time
    import kvdb._native as native
    from kvdb.client.forgotten import CLOSER

    class Slow:
        \"\"\"Takes its time to close, and holds what must not outlive the interpreter.\"\"\"

        def __init__(self):
            self.native, self.begun = native.Geometry(native.Dtype.float32, 1, 16), threading.Event()

        def close(self):
            self.begun.set()
            time.sleep(0.02)
            assert sys is not None

    handles, slow = [type("Handle", (), {})() for _ in range(20)], Slow()
    for handle in handles:
        CLOSER.close_with(handle, slow if handle is handles[0] else Slow())
    del handle, handles
    assert slow.begun.wait(20)
"""


def test_a_program_that_ends_while_sessions_are_closed_leaves_nothing_behind():
    ended = subprocess.run([sys.executable, "-c", dedent(ENDS)], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
