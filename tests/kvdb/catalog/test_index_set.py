"""The set of indexes over one segment, read while others write."""

import sys
import threading

from kvdb.catalog.index_set import IndexSet, Progress
from tests.waiting import SECONDS_MAX


def test_progress_is_reported_replaced_and_withdrawn():
    indexes = IndexSet()
    indexes.report("flat", Progress("waiting"))
    before = indexes.progress
    indexes.report("flat", Progress("building", 0.5))
    indexes.report("hnsw", Progress("failed", error="no room"))
    assert before == {"flat": Progress("waiting")}, "a mapping once read stays as it was"
    assert indexes.in_progress() == ("flat",)
    indexes.report("flat", None)
    indexes.report("flat", None)
    assert list(indexes.progress) == ["hnsw"]
    indexes.report("flat", Progress("ready", 1.0))
    indexes.clear()
    assert list(indexes.progress) == ["hnsw"], "what failed stays known"


def test_progress_is_read_and_cleared_while_others_report():
    indexes, wrong, end = IndexSet(), [], threading.Event()

    def report(name):
        number = 0
        while not end.is_set():
            number += 1
            indexes.report(f"{name}{number % 50}", Progress("failed") if number % 3 else None)

    def read():
        try:
            while not end.is_set():
                for kind in indexes.progress:
                    assert kind
                indexes.in_progress()
        except RuntimeError as error:
            wrong.append(error)

    threads = [threading.Thread(target=report, args=(name,)) for name in "ab"] + [threading.Thread(target=read)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(2000):
            indexes.clear()
    finally:
        end.set()
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join(SECONDS_MAX)
    assert not wrong
