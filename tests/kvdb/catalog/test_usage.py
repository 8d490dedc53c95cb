"""Counts of a segment's queries, read while they are counted."""

from dataclasses import astuple

from kvdb.catalog.evidence.usage import QueryCounts, SegmentUsage
from tests.racing import race

ONE = QueryCounts(1, 1.0, 1, 1.0, 1.0, 1)


def test_counts_add_up():
    usage = SegmentUsage()
    for _ in range(3):
        usage.count_queries(ONE, version=1, every=10)
    assert usage.recent == QueryCounts(3, 3.0, 3, 3.0, 3.0, 3)
    usage.count_queries(ONE, version=2, every=10)
    assert usage.recent == ONE, "what was counted under other indexes says nothing of these"
    assert usage.queries_in_all == 4


def test_counts_that_are_read_belong_together():
    usage = SegmentUsage()

    def read():
        counts = usage.recent
        assert len(set(astuple(counts))) == 1

    race(read, lambda: usage.count_queries(ONE, version=1, every=10), lambda: usage.count_queries(ONE, version=1, every=10))
    assert usage.recent.queries == usage.queries_in_all
