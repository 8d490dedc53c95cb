"""Every strategy computes what was asked for, and never a token that is in no chunk."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdb.blend.strategies as strategies
from kvdb.blend.strategies import DEFAULT_RATIO, FIXED, STRATEGIES, Recompute, at_random, first_of_each, inside
from kvdb.errors import InvalidArgument

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


@pytest.mark.parametrize("name", ["first", "random"])
@settings(deadline=None)
@given(spans(), RATIOS, st.integers(0, 100))
def test_fixed_ones_take_the_share_that_was_asked_for(name, chunks, ratio, seed):
    flags = FIXED[name](*chunks, ratio, seed)
    chunk = inside(*chunks)
    assert flags.shape == (chunks[1],)
    assert not (flags & ~chunk).any()
    assert flags.sum() == pytest.approx(ratio * chunk.sum(), abs=0.5)


@pytest.mark.parametrize("name", STRATEGIES)
@settings(deadline=None)
@given(spans(), st.integers(1, 6), st.integers(0, 3))
def test_at_one_all_are_computed_in_every_layer(name, chunks, layers, seed):
    strategy = strategies.make(Recompute(1.0, name, seed=seed), *chunks, layers)
    through = carried_out(strategy, layers, np.zeros(chunks[1], np.float32))
    expected = inside(*chunks) if name != "none" and (name != "deviation" or layers > 1) else np.zeros(chunks[1], bool)
    np.testing.assert_array_equal(through, np.broadcast_to(expected, through.shape))


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "all"])
@settings(deadline=None)
@given(spans(), st.integers(1, 6))
def test_at_zero_none_are_computed(name, chunks, layers):
    strategy = strategies.make(Recompute(0, name), *chunks, layers)
    assert not carried_out(strategy, layers, np.ones(chunks[1], np.float32)).any()
    assert not strategy.start().any()


def test_all_and_none_know_no_ratio():
    chunks = [(2, 6), (8, 9)]
    for ratio in (0.0, 0.3, 1.0):
        np.testing.assert_array_equal(FIXED["all"](chunks, 10, ratio, 0), inside(chunks, 10))
        assert not FIXED["none"](chunks, 10, ratio, 0).any()


@settings(deadline=None)
@given(spans(), RATIOS)
def test_first_takes_heads_of_equal_length(chunks, ratio):
    flags = first_of_each(*chunks, ratio, 0)
    served = [(begin, end) for begin, end in chunks[0] if begin > 0]
    taken = [int(flags[begin:end].sum()) for begin, end in served]
    for (begin, _), count in zip(served, taken, strict=True):
        assert flags[begin : begin + count].all()
    unfilled = [count for (begin, end), count in zip(served, taken, strict=True) if count < end - begin]
    if unfilled:
        assert max(taken) - min(unfilled) <= 1
        assert unfilled == sorted(unfilled, reverse=True)
        assert not any(flags[begin:end].any() for begin, end in chunks[0] if begin == 0)


def test_first_gives_the_rest_of_short_chunks_to_longer_ones():
    chunks = [(0, 40), (40, 42), (42, 62), (62, 100)]
    taken = [int(first_of_each(chunks, 100, 0.12, 0)[begin:end].sum()) for begin, end in chunks]
    assert taken == [0, 2, 5, 5]


def test_first_never_computes_the_first_chunk_before_all_others():
    assert first_of_each([(0, 50), (50, 60)], 60, 0.5, 0)[50:].all()
    assert first_of_each([(0, 50), (50, 60)], 60, 0.5, 0).sum() == 30


def test_random_follows_its_seed():
    chunks = [(10, 400)], 500
    assert (at_random(*chunks, 0.3, 1) == at_random(*chunks, 0.3, 1)).all()
    assert (at_random(*chunks, 0.3, 1) != at_random(*chunks, 0.3, 2)).any()


@settings(deadline=None)
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


def test_deviation_takes_those_that_deviate_most():
    scores = np.zeros(100, np.float32)
    scores[[20, 31, 55, 56]] = [4, 3, 2, 1]
    strategy = strategies.make(Recompute(0.05, steepness=1.0), [(10, 50), (52, 92)], 100, layers=5)
    through = carried_out(strategy, 5, scores)
    assert through[0].sum() == 80
    assert through[1:].sum() == 16
    assert through[1, [20, 31, 55, 56]].all()
    assert list(np.flatnonzero(through[3])) == [20, 31, 55][: through[3].sum()]


def test_deviation_of_a_token_reaches_those_behind_it():
    scores = np.zeros(100, np.float32)
    scores[30] = 1
    strategy = strategies.make(Recompute(0.05, steepness=0, spread=4), [(0, 100)], 100, layers=3)
    assert list(np.flatnonzero(carried_out(strategy, 3, scores)[2])) == [30, 31, 32, 33, 34]


def test_tokens_without_stored_kv_go_on_beside_the_share():
    strategy = strategies.make(Recompute(0.5, steepness=0), [(5, 15)], 20, layers=2)
    positions = np.arange(20)
    scores = np.where((positions < 5) | (positions >= 15), np.inf, positions).astype(np.float32)
    flags = strategy.goes_on(1, positions, scores)
    np.testing.assert_array_equal(flags, (positions < 5) | (positions >= 10))


def test_a_strategy_hands_out_copies():
    for name in STRATEGIES:
        strategy = strategies.make(Recompute(0.5, name), [(1, 9)], 10, 3)
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
        ({"strategy": "best"}, "strategy is 'best'; expected one of deviation, all, none, first, random"),
        ({"strategy": None}, "strategy is None"),
        ({"strategy": ["all"]}, "strategy is"),
        ({"score": "best"}, "no score of deviation is named 'best'"),
        ({"spread": -1}, "spread is -1; expected an integer of at least 0"),
        ({"spread": 1.0}, "spread is 1.0"),
        ({"spread": True}, "spread is True"),
        ({"steepness": 2}, "steepness is 2"),
        ({"steepness": float("inf")}, "steepness is inf"),
        ({"check_layer": 0}, "check_layer is 0; expected an integer of at least 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_options_that_cannot_be_are_refused(given_options, words):
    with pytest.raises(InvalidArgument, match=words):
        Recompute(**given_options)


def test_options_from_what_callers_give():
    assert Recompute.of(None) == Recompute()
    assert Recompute().share == DEFAULT_RATIO
    assert Recompute(floor=0.4).share == 0.4
    assert Recompute(0.2, floor=0.4).share == 0.2
    assert Recompute.of(0) == Recompute(ratio=0.0)
    assert Recompute.of(np.float32(0.5)) == Recompute(ratio=0.5)
    assert type(Recompute.of(1).ratio) is float
    mine = Recompute(0.3, "first")
    assert Recompute.of(mine) is mine
    for wrong in (True, "all", float("nan"), 2):
        with pytest.raises(InvalidArgument):
            Recompute.of(wrong)
