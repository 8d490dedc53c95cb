"""Costs of all kinds: they follow the numbers they are given, and stay numbers."""

import math
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import indexes.registry as registry
from indexes.blocks import Blocks
from indexes.retrieval import Dipr, Exact, TopK, TopP
from indexes.selectivity import GUESS, Selectivity
from query_optimizer.cost import Machine

HEADS, D = 4, 32
KINDS = list(registry.KINDS)
retrievals = st.one_of(
    st.just(Exact()),
    st.floats(1e-4, 1).map(Dipr),
    st.integers(1, 2048).map(TopK),
    st.floats(0.01, 1).map(TopP),
)
tokens = st.integers(1, 1 << 20)
rows = st.integers(1, 64)
expected_tokens = st.none() | st.floats(0, 1 << 20)


@lru_cache
def index(kind):
    keys = np.random.default_rng(0).standard_normal((HEADS, 200, D), np.float32)
    return registry.build(kind, Blocks.of(keys))


def seconds(kind, tokens, rows, retrieval, **known):
    """Seconds of a step, with what is read whole where the index gives up."""
    machine, cost = Machine(), index(kind).cost(tokens, rows, retrieval, **known)
    heads = known.get("heads") or HEADS
    whole = machine.exact_seconds(tokens * heads * D * 8, 2.0 * tokens * heads * rows * D)
    return machine.step_seconds() + machine.search_seconds(cost) + cost.given_up * whole


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=tokens, rows=rows, retrieval=retrievals, expected_tokens=expected_tokens)
def test_a_cost_is_finite_and_not_negative(kind, tokens, rows, retrieval, expected_tokens):
    cost = index(kind).cost(tokens, rows, retrieval, expected_tokens=expected_tokens)
    for value in (cost.nbytes, cost.operations, cost.jumps, cost.given_up):
        assert math.isfinite(value)
        assert value >= 0
    assert cost.given_up <= 1


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=tokens, rows=rows, retrieval=retrievals, expected_tokens=expected_tokens)
def test_more_rows_never_cost_less(kind, tokens, rows, retrieval, expected_tokens):
    once, twice = (seconds(kind, tokens, n, retrieval, expected_tokens=expected_tokens) for n in (rows, 2 * rows))
    few, many = (index(kind).cost(tokens, n, retrieval, expected_tokens=expected_tokens).given_up for n in (rows, 2 * rows))
    # More rows are given up sooner, and then reading a short context may cost less than searching it.
    assert once <= twice * 1.05 or few < many


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=tokens, rows=rows, retrieval=retrievals, expected_tokens=expected_tokens, heads=st.integers(1, HEADS - 1))
def test_more_heads_never_cost_less(kind, tokens, rows, retrieval, expected_tokens, heads):
    few, all_of_them = (
        index(kind).cost(tokens, rows, retrieval, expected_tokens=expected_tokens, heads=n) for n in (heads, HEADS)
    )
    assert few.nbytes <= all_of_them.nbytes
    assert few.operations <= all_of_them.operations
    assert few.jumps <= all_of_them.jumps
    assert few.given_up == all_of_them.given_up
    assert index(kind).cost(tokens, rows, retrieval, expected_tokens=expected_tokens) == all_of_them


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=st.integers(8192, 1 << 17), rows=rows, retrieval=retrievals, expected_tokens=expected_tokens)
def test_eight_times_the_tokens_never_cost_much_less(kind, tokens, rows, retrieval, expected_tokens):
    """A search that no longer gives up, behind which everything is read, may cost less."""
    few, many = (seconds(kind, n, rows, retrieval, expected_tokens=expected_tokens) for n in (tokens, 8 * tokens))
    early, late = (index(kind).cost(n, rows, retrieval, expected_tokens=expected_tokens).given_up for n in (tokens, 8 * tokens))
    assert few <= many * 1.25 or early > late


@pytest.mark.parametrize("kind", KINDS)
@given(
    tokens=st.integers(8192, 1 << 20),
    rows=st.integers(1, 16),
    alpha=st.floats(1e-3, 0.5),
    share=st.floats(0, 0.5),
    times=st.floats(1, 8),
)
def test_more_wanted_tokens_never_cost_much_less(kind, tokens, rows, alpha, share, times):
    few, many = (seconds(kind, tokens, rows, Dipr(alpha), expected_tokens=share * tokens * n) for n in (1, times))
    assert few <= many * 1.25  # what is given up early is not searched for


@pytest.mark.parametrize("kind", KINDS)
def test_what_sharp_heads_want_of_a_long_context_costs_less_than_reading_all(kind):
    tokens = 1 << 18
    exact = Machine().exact_seconds(tokens * HEADS * D * 8)
    assert seconds(kind, tokens, 4, Dipr(0.1), expected_tokens=50) < exact
    assert seconds(kind, tokens, 4, Dipr(0.1), expected_tokens=tokens / 5) > exact


@pytest.mark.parametrize("kind", KINDS)
def test_the_old_call_takes_the_documented_guess(kind):
    assert index(kind).cost(1 << 17, 4, Dipr()) == index(kind).cost(1 << 17, 4, Dipr(), expected_tokens=GUESS)


def test_a_walk_hardly_grows_with_the_tokens_and_a_scan_does():
    walk, scan = ([index(kind).cost(n, 4, Dipr(), expected_tokens=70) for n in (1 << 16, 1 << 20)] for kind in ("hnsw", "flat"))
    assert walk[1].jumps < 2 * walk[0].jumps
    assert walk[1].nbytes == walk[0].nbytes
    assert scan[1].operations > 15 * scan[0].operations


def test_demand_of_one_token_and_of_none():
    assert Selectivity.of(TopK(10), 1, None).expected_tokens == 1
    assert Selectivity.of(Dipr(), 0, None).expected_tokens == 0
    assert Selectivity.of(Dipr(), 0, None).crowded == 0
    assert Selectivity.of(Dipr(), 1 << 16, 40).spread < 0.1
    assert Selectivity.of(Dipr(), 1 << 16, 2000).spread > 0.9
