"""A machine makes seconds of costs, and is itself a few positive numbers."""

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexes.base import Cost
from query_optimizer.cost import Machine, WrongMachine

NAMES = [field.name for field in fields(Machine)]
positive = st.floats(1e-9, 1e12)


@given(st.lists(positive, min_size=len(NAMES), max_size=len(NAMES)))
def test_any_positive_numbers_make_the_round_trip(values):
    machine = Machine(*values)
    assert Machine.from_dict(machine.to_dict()) == machine
    assert math.isfinite(machine.seconds(Cost(1e9, 1e9, 1e3)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "3", None, True])
def test_what_is_no_positive_number_is_refused(name, value):
    with pytest.raises(WrongMachine, match=name):
        Machine.from_dict(Machine().to_dict() | {name: value})


def test_missing_and_unknown_names_are_refused():
    values = Machine().to_dict()
    for wrong in ({}, {**values, "more": 1.0}, {name: values[name] for name in NAMES[1:]}):
        with pytest.raises(WrongMachine, match="stream_bytes_s"):
            Machine.from_dict(wrong)


def test_costs_add_up():
    machine = Machine(stream_bytes_s=100.0, operations_s=10.0, jump_s=3.0)
    assert machine.seconds(Cost(200.0, 30.0, 2.0)) == pytest.approx(2 + 3 + 6)


def test_exact_reads_caches_first_and_multiplies_meanwhile():
    machine = Machine(stream_bytes_s=10.0, cached_bytes_s=100.0, cache_bytes=1000.0, operations_s=5.0, exact_call_s=1.0)
    assert machine.exact_seconds(500) == pytest.approx(1 + 5)
    assert machine.exact_seconds(1500) == pytest.approx(1 + 10 + 50)
    assert machine.exact_seconds(1500, 1000) == pytest.approx(1 + 200)


def test_a_search_is_its_cost_and_the_values_of_what_it_finds():
    machine = Machine(stream_bytes_s=10.0, gather_bytes_s=2.0, search_s=1.0)
    cost = Cost(20.0, 0.0)
    assert machine.search_seconds(cost, 8) == pytest.approx(1 + 2 + 4)
    assert machine.search_seconds(replace(cost, given_up=0.5), 8) == pytest.approx(1 + 2 + 2)
