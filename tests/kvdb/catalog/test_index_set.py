"""The set of indexes over one segment, read while others write."""

from itertools import count

from kvdb.catalog.segments.index_set import IndexSet, Progress
from tests.racing import race


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
    indexes, numbers = IndexSet(), count()

    def report():
        number = next(numbers)
        indexes.report(str(number % 100), Progress("failed") if number % 3 else None)

    def read():
        for kind in indexes.progress:
            assert kind
        indexes.in_progress()

    race(report, report, read, indexes.clear)
