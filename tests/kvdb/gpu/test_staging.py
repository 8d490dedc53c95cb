"""Staging hands out memory that nothing under way still uses, and keeps few buffers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdb.gpu.staging import BUFFER_BYTES_MIN, BUFFERS, Staging
from kvdb.gpu.streams import ImmediateStream


class Mark:
    """An event that has passed when the test says so, or when the host waits for it."""

    def __init__(self):
        self.passed, self.waited = False, False

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = self.waited = True


class Slow:
    """A stream of marks."""

    def __init__(self):
        self.marks = []

    def record_event(self):
        self.marks.append(Mark())
        return self.marks[-1]


def address(buffer):
    return buffer.tensor.data_ptr()


def test_a_buffer_is_one_memory_for_numpy_and_torch():
    buffer = Staging(pinned=False).take(1000)
    buffer.array[:] = 7
    assert buffer.tensor.shape == (1000,)
    assert buffer.tensor.dtype == torch.uint8
    assert (buffer.tensor == 7).all()
    assert buffer.array.view(np.uint64).shape == (125,)


def test_what_was_sent_is_used_again_only_when_it_is_done():
    staging, stream = Staging(pinned=False), Slow()
    first = staging.take(1000)
    where = address(first)
    first.sent(stream)
    second = staging.take(1000)
    assert address(second) != where
    stream.marks[0].passed = True
    assert address(staging.take(1000)) == where
    assert not stream.marks[0].waited


def test_the_host_waits_for_the_oldest_when_enough_are_under_way():
    staging, stream = Staging(pinned=False), Slow()
    for _ in range(BUFFERS):
        staging.take(10).sent(stream)
    assert staging.nbytes == BUFFERS * BUFFER_BYTES_MIN
    staging.take(10)
    assert [mark.waited for mark in stream.marks] == [True] + [False] * (BUFFERS - 1)
    assert staging.nbytes == BUFFERS * BUFFER_BYTES_MIN


def test_a_larger_one_takes_the_place_of_one_that_is_too_small():
    staging, stream = Staging(pinned=False), Slow()
    for _ in range(BUFFERS):
        staging.take(10).sent(stream)
    large = staging.take(3 * BUFFER_BYTES_MIN)
    assert staging.nbytes == (BUFFERS - 1 + 4) * BUFFER_BYTES_MIN
    large.unused()
    assert address(staging.take(4 * BUFFER_BYTES_MIN)) == address(large)


def test_holders_never_wait_for_each_other():
    staging = Staging(pinned=False)
    held = [staging.take(10) for _ in range(3 * BUFFERS)]
    assert len({address(buffer) for buffer in held}) == len(held)
    for buffer in held:
        buffer.unused()
    assert staging.nbytes == BUFFERS * BUFFER_BYTES_MIN


def test_an_error_between_gives_the_buffer_back():
    staging = Staging(pinned=False)
    with pytest.raises(ZeroDivisionError), staging.take(10) as buffer:
        raise ZeroDivisionError
    with pytest.raises(AssertionError, match="twice"):
        buffer.unused()
    with staging.take(10) as again:
        assert address(again) == address(buffer)
        again.sent(ImmediateStream())


def test_closing_waits_and_gives_all_back():
    staging, stream = Staging(pinned=False), Slow()
    held = staging.take(10)
    staging.take(10).sent(stream)
    staging.close()
    assert stream.marks[0].waited
    assert staging.nbytes == BUFFER_BYTES_MIN
    held.unused()
    staging.close()
    assert staging.nbytes == 0


@given(
    st.lists(st.tuples(st.integers(1, 5 * BUFFER_BYTES_MIN), st.sampled_from(["hold", "sent", "unused", "pass"])), max_size=40)
)
def test_no_two_use_the_same_memory_and_every_byte_is_counted(steps):
    staging, stream, busy, known = Staging(pinned=False), Slow(), [], {}
    for nbytes, what in steps:
        buffer = staging.take(nbytes)
        busy = [(where, mark) for where, mark in busy if mark is None or not mark.passed]
        assert address(buffer) not in {where for where, _ in busy}
        assert len(buffer.array) == nbytes
        if what == "hold":
            known[len(known)] = buffer
            busy.append((address(buffer), None))
        elif what == "unused":
            buffer.unused()
        else:
            buffer.sent(stream)
            stream.marks[-1].passed = what == "pass"
            busy.append((address(buffer), stream.marks[-1]))
    for buffer in known.values():
        buffer.unused()
    staging.close()
    assert staging.nbytes == 0
