"""Every strategy computes what was asked for, and never a token that is in no chunk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdb.blend.strategies as strategies
from benchmarks.blend_strategies import First, Random
from kvdb.blend.strategies import DEFAULT_ERROR_MAX, ByDeviation, Recompute, inside
from kvdb.errors import InvalidArgument

STRATEGIES = [None, First, Random]
RATIOS = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.15, 0.5, 1.0]))


@st.composite
def spans(draw):
    """Chunks with gaps between, and how long the prompt is."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=8))
    found, until = [], 0
    for gap, length in sizes:
        found.append((until + gap, until + gap + length))
        until += gap + length
    return found, until + draw(st.integers(0, 5))


def carried_out(strategy, layers, deviates):
    """Tokens computed in each layer, where `deviates` scores every position of the prompt."""
    computed, through = strategy.start(), []
    for layer in range(layers):
        positions = np.flatnonzero(computed)
        if strategy.checks(layer):
            computed[positions] = strategy.goes_on(layer, positions, deviates[positions])
        through.append(computed.copy())
    return np.array(through)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(spans(), st.integers(1, 6))
def test_at_one_all_are_computed_in_every_layer(strategy, chunks, layers):
    made = strategies.make(Recompute(1.0, strategy=strategy), *chunks, layers)
    through = carried_out(made, layers, np.zeros(chunks[1], np.float32))
    expected = inside(*chunks) if strategy is not None or layers > 1 else np.zeros(chunks[1], bool)
    np.testing.assert_array_equal(through, np.broadcast_to(expected, through.shape))


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(spans(), st.integers(1, 6))
def test_at_zero_none_are_computed(strategy, chunks, layers):
    made = strategies.make(Recompute(0, strategy=strategy), *chunks, layers)
    assert not carried_out(made, layers, np.ones(chunks[1], np.float32)).any()
    assert not made.start().any()


@given(spans(), RATIOS, st.integers(1, 30), st.floats(0, 1), st.integers(1, 4), st.integers(0, 1000))
def test_deviation_computes_its_share_over_the_layers(chunks, ratio, layers, steepness, check_layer, seed):
    scores = np.random.default_rng(seed).random(chunks[1]).astype(np.float32)
    options = Recompute(ratio, steepness=steepness, check_layer=check_layer)
    through = carried_out(strategies.make(options, *chunks, layers), layers, scores)
    first = min(check_layer, max(layers - 1, 1))
    chunk = inside(*chunks)
    assert not (through & ~chunk).any()
    assert (through[1:] <= through[:-1]).all()
    assert through[first:].sum() == pytest.approx(ratio * chunk.sum() * max(layers - first, 0), abs=1)


@given(spans(), RATIOS, st.integers(1, 6), st.integers(1, 4), st.integers(0, 1000))
def test_a_ratio_that_is_settled_at_the_check_layer_goes_on_like_one_that_was_given(chunks, ratio, layers, check_layer, seed):
    scores = np.random.default_rng(seed).random(chunks[1]).astype(np.float32)
    late, early = (ByDeviation(Recompute(given, check_layer=check_layer), *chunks, layers) for given in (None, ratio))
    assert late.settled == (layers == 1 or not inside(*chunks).any())
    computed = late.start()
    for layer in range(layers):
        positions = np.flatnonzero(computed)
        if late.checks(layer):
            if not late.settled:
                assert layer == min(check_layer, layers - 1)
                late.settle(ratio)
            computed[positions] = late.goes_on(layer, positions, scores[positions])
    if layers > 1:
        np.testing.assert_array_equal(late.counts, early.counts)
        np.testing.assert_array_equal(computed, carried_out(early, layers, scores)[-1])


def test_deviation_takes_those_that_deviate_most():
    scores = np.zeros(100, np.float32)
    scores[[20, 31, 55, 56]] = [4, 3, 2, 1]
    strategy = strategies.make(Recompute(0.05, steepness=1.0), [(10, 50), (52, 92)], 100, layers=5)
    through = carried_out(strategy, 5, scores)
    assert through[0].sum() == 80
    assert through[1:].sum() == 16
    assert through[1, [20, 31, 55, 56]].all()
    assert list(np.flatnonzero(through[3])) == [20, 31, 55][: through[3].sum()]


def test_tokens_without_stored_kv_go_on_beside_the_share():
    strategy = strategies.make(Recompute(0.5, steepness=0), [(5, 15)], 20, layers=2)
    positions = np.arange(20)
    scores = np.where((positions < 5) | (positions >= 15), np.inf, positions).astype(np.float32)
    flags = strategy.goes_on(1, positions, scores)
    np.testing.assert_array_equal(flags, (positions < 5) | (positions >= 10))


def test_a_strategy_hands_out_copies():
    for kind in STRATEGIES:
        strategy = strategies.make(Recompute(0.5, strategy=kind), [(1, 9)], 10, 3)
        before = strategy.start().copy()
        strategy.start()[:] = True
        np.testing.assert_array_equal(strategy.start(), before)


@pytest.mark.parametrize("chunks", [[(0, 5), (4, 9)], [(5, 9), (0, 5)], [(-1, 3)], [(3, 11)], [(5, 3)]])
def test_spans_that_cannot_be_are_refused(chunks):
    with pytest.raises(InvalidArgument, match="expected ascending spans"):
        strategies.make(Recompute(), chunks, 10, 2)


@pytest.mark.parametrize(
    ("given_options", "words"),
    [
        ({"ratio": 1.01}, "Recompute.ratio is 1.01; expected a number from 0 to 1"),
        ({"ratio": -0.1}, "ratio is -0.1"),
        ({"ratio": float("nan")}, "ratio is nan"),
        ({"ratio": True}, "ratio is True"),
        ({"ratio": "0.5"}, "ratio is '0.5'"),
        ({"floor": 1.5}, "floor is 1.5"),
        ({"error_max": -1e-9}, "error_max is -1e-09; expected a number from 0 to 1"),
        ({"error_max": 1.1}, "error_max is 1.1"),
        ({"error_max": float("nan")}, "error_max is nan"),
        ({"error_max": None}, "error_max is None"),
        ({"strategy": "first"}, "strategy is 'first'; expected None for the tokens that deviate most, or a function"),
        ({"strategy": ["all"]}, "strategy is"),
        ({"steepness": 2}, "steepness is 2"),
        ({"steepness": float("inf")}, "steepness is inf"),
        ({"check_layer": 0}, "check_layer is 0; expected an integer of at least 1"),
        ({"check_layer": 1.0}, "check_layer is 1.0"),
        ({"check_layer": True}, "check_layer is True"),
    ],
)
def test_options_that_cannot_be_are_refused(given_options, words):
    with pytest.raises(InvalidArgument, match=words):
        Recompute(**given_options)


def test_options_from_what_callers_give():
    assert Recompute.of(None) == Recompute()
    assert (Recompute().share, Recompute().error_max) == (0, DEFAULT_ERROR_MAX)
    assert Recompute(floor=0.4).share == 0.4
    assert Recompute(0.2, floor=0.4).share == 0.2
    assert Recompute.of(0) == Recompute(ratio=0.0)
    assert Recompute.of(np.float32(0.5)) == Recompute(ratio=0.5)
    assert type(Recompute.of(1).ratio) is float
    mine = Recompute(0.3, strategy=First)
    assert Recompute.of(mine) is mine
    for wrong in (True, "all", float("nan"), 2):
        with pytest.raises(InvalidArgument):
            Recompute.of(wrong)
