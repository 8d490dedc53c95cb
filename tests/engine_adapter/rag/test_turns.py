"""Turns come in the order in which they were asked for."""

import threading

from engine_adapter.rag.attached import FairLock
from tests.waiting import until


def test_who_comes_first_is_served_first():
    turns, served, threads = FairLock(), [], []

    def work(number):
        with turns.mine():
            served.append(number)

    with turns.mine():
        for number in range(8):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            until(lambda number=number: len(turns._waiting) > number)
    for thread in threads:
        thread.join()
    assert served == list(range(8))
    assert not turns._taken


def test_an_error_ends_a_turn():
    turns = FairLock()
    try:
        with turns.mine():
            raise RuntimeError
    except RuntimeError:
        pass
    with turns.mine():
        assert turns._taken
