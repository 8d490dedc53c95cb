"""Averages over the queries of a segment."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvdb.attention.observation import Observation
from kvdb.catalog.evidence.statistics import MEMORY, Statistics
from kvdb.types import MEASURES

HEADS = 3
SHARES = hnp.arrays(np.float32, (len(MEASURES), HEADS), elements=st.floats(0, 1, width=32))
SEEN = st.none() | hnp.arrays(bool, (len(MEASURES), HEADS))


def shown(value):
    return Observation(np.full((len(MEASURES), HEADS), value, np.float32), None)


def test_nothing_is_known_of_a_layer_before_it_was_observed():
    statistics = Statistics()
    statistics.observe(1, shown(0.5))
    assert statistics.of(0) is None
    whole = statistics.of_segment(7, 1000, 3 * [HEADS])
    assert (whole.segment, whole.tokens) == (7, 1000)
    assert whole.queries.tolist() == [[0] * HEADS, [1] * HEADS, [0] * HEADS]
    for name in MEASURES:
        assert getattr(whole, name).tolist() == [[0] * HEADS, [0.5] * HEADS, [0] * HEADS]


def test_the_first_counts_in_full_the_first_ones_alike_and_later_ones_a_sixteenth():
    statistics = Statistics()
    values = np.random.default_rng(0).random(40)
    for i, value in enumerate(values, 1):
        statistics.observe(0, shown(value))
        layer = statistics.of(0)
        if i <= MEMORY:
            expected = values[:i].mean()
        else:
            expected += (value - expected) / 16
        assert layer.retrieved == pytest.approx([expected] * HEADS, rel=1e-5)
    assert layer.queries.tolist() == [40] * HEADS
    assert statistics.version == 40


@given(st.lists(st.tuples(SHARES, SEEN), max_size=40))
def test_averages_stay_between_the_least_and_the_most_that_was_seen(observations):
    statistics = Statistics()
    for values, seen in observations:
        statistics.observe(0, Observation(values, seen))
    layer = statistics.of(0)
    assert (layer is None) == (not observations)
    whole = statistics.of_segment(1, 1, [HEADS])
    for row, name in enumerate(MEASURES):
        (averages,) = getattr(whole, name)
        for head in range(HEADS):
            there = [values[row, head] for values, seen in observations if seen is None or seen[row, head]]
            assert min(there, default=0) <= averages[head] <= max(there, default=0)
    if layer:
        assert layer.queries.tolist() == [sum(s is None or s[0, head] for _, s in observations) for head in range(HEADS)]


def test_a_snapshot_stays_as_it_was_and_cannot_be_written():
    statistics = Statistics()
    statistics.observe(0, shown(0.25))
    before = statistics.of(0)
    whole = statistics.of_segment(1, 1, [HEADS])
    statistics.observe(0, shown(0.75))
    assert before.retrieved.tolist() == whole.retrieved[0].tolist() == [0.25] * HEADS
    assert statistics.of(0).retrieved.tolist() == [0.5] * HEADS
    for array in (before.queries, before.retrieved, before.dense, whole.queries, whole.dense, whole.sharpness):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_observations_from_many_threads_all_count():
    statistics = Statistics()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(lambda: [statistics.observe(i % 2, shown(0.5)) for i in range(300)])
    assert statistics.version == 2400
    for layer in range(2):
        assert statistics.of(layer).queries.tolist() == [1200] * HEADS
