"""The queries that a layer keeps: evenly spread, never more than there may be, and counted."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb.errors import CapacityError
from kvdb.session.query_samples import QuerySamples
from kvdb.storage import budget as budgets
from kvdb.storage.budget import CpuBudget, Reservation

HEADS, DIM = 2, 4
QUERY_BYTES = HEADS * DIM * 4


def queries(first, n):
    """Queries `[HEADS, n, DIM]`, each of which says which one it is."""
    return np.broadcast_to(np.arange(first, first + n, dtype=np.float32)[None, :, None], (HEADS, n, DIM))


@pytest.fixture
def counts_all(monkeypatch):
    """Every byte beside blocks counts."""
    monkeypatch.setattr(budgets, "FREE_BYTES", 0)
    monkeypatch.setattr(budgets, "FREE_SHARE", 1 << 60)


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(0, 16))
def test_those_that_are_kept_are_spread_evenly_over_all(calls, most):
    samples, seen = QuerySamples(most, Reservation(CpuBudget(None))), 0
    for n in calls:
        samples.add(queries(seen, n))
        seen += n
        kept = samples.all()
        numbers = [] if kept is None else kept[0, :, 0].astype(int).tolist()
        assert len(numbers) <= most
        if most and seen:
            step = numbers[1] if len(numbers) > 1 else seen
            assert numbers == list(range(0, seen, step))[: len(numbers)]
            assert most < 2 or 2 * len(numbers) + 1 >= min(seen, most), "no more are dropped than must be"
            assert samples.last[0, 0, 0] == seen - 1


def test_they_count_and_where_there_is_no_room_fewer_are_kept(counts_all):
    budget = CpuBudget(20 * QUERY_BYTES)
    first, second = (QuerySamples(16, Reservation(budget)) for _ in range(2))
    for i in range(100):
        first.add(queries(i, 1))
        second.add(queries(i, 1))
        kept = sum(samples.all().nbytes for samples in (first, second) if samples.all() is not None)
        assert budget.left == budget.limit - kept
    first.release()
    assert first.all() is None
    for i in range(100, 164):
        second.add(queries(i, 1))
    second.release()
    second.release()
    assert budget.left == budget.limit


def test_a_long_prompt_takes_no_more_while_some_of_it_is_picked():
    samples, prompt = QuerySamples(64, Reservation(CpuBudget(None))), np.ones((8, 20_000, 32), np.float32)
    tracemalloc.start()
    try:
        samples.add(prompt)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert samples.all().shape[1] in range(33, 65)
    assert most < 4 * 64 * 8 * 32 * 4


def test_a_reservation_that_finds_no_room_is_as_it_was(counts_all):
    budget = CpuBudget(100)
    held = Reservation(budget, 60)
    with pytest.raises(CapacityError):
        held.resize(101)
    assert (held.nbytes, budget.left) == (60, 40)
    held.resize(10)
    assert budget.left == 90
    held.release()
    assert budget.left == 100


def test_what_stands_beside_blocks_counts_where_it_is_more_than_a_process_may_take_anyway():
    budget = CpuBudget(1 << 30)
    free = budgets.FREE_BYTES + (1 << 30) // budgets.FREE_SHARE
    held = Reservation(budget, free)
    assert budget.left == 1 << 30
    more = Reservation(budget, 1000)
    assert budget.left == (1 << 30) - 1000
    held.release()
    assert budget.left == 1 << 30
    more.release()
    assert budget.left == 1 << 30
