"""The largest are kept, and the shares of the layers add up to what was asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb.blend.schedule import STEPS, counts, gradual, keep

SCORES = st.lists(st.one_of(st.integers(0, 5).map(float), st.just(float("inf")), st.just(float("nan"))), max_size=40)
RATIOS = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-12, 0.05, 0.15, 0.5, 0.95, 1.0]))


@given(SCORES, st.integers(0, 45))
def test_keep_takes_the_largest_and_of_equals_the_first(given_scores, count):
    scores = np.array(given_scores, np.float32)
    ranked = np.where(np.isnan(scores), np.inf, scores)
    order = sorted(range(len(scores)), key=lambda i: (-ranked[i], i))
    count_expected = max(count, int(np.isposinf(ranked).sum()))
    flags = keep(scores, count)
    assert flags.dtype == np.bool_
    assert set(np.flatnonzero(flags)) == set(order[:count_expected])


def test_keep_of_negative_infinities_is_the_first():
    np.testing.assert_array_equal(keep(np.full(4, -np.inf, np.float32), 2), [True, True, False, False])


@pytest.mark.parametrize("layers", [1, 2, 3, 24, 80])
@given(ratio=RATIOS, first=st.integers(1, 5), steepness=st.floats(0, 1))
def test_shares_fall_and_average_what_was_asked(layers, ratio, first, steepness):
    shares = gradual(layers, ratio, first, steepness)
    assert shares.shape == (layers,)
    np.testing.assert_array_equal(shares[:first], 0)
    chosen = shares[first:]
    assert ((chosen >= 0) & (chosen <= 1 + 1e-12)).all()
    assert (np.diff(chosen) <= 0).all()
    if chosen.size:
        assert chosen.mean() == pytest.approx(ratio, abs=1e-12)


def test_deeper_layers_take_less_by_few_steps():
    shares = gradual(24, 0.15, steepness=0.5)
    falls = np.diff(shares[1:])
    assert (falls <= 0).all()
    assert np.count_nonzero(falls) == STEPS - 1
    assert 0.15 * 1.5 > shares[1] > 0.15 > shares[-1] > 0.15 * 0.5
    assert (np.diff(gradual(24, 0.9, steepness=0.5)[1:]) <= 0).all()


def test_all_and_nothing():
    np.testing.assert_array_equal(gradual(24, 1.0, steepness=0.5)[1:], 1)
    np.testing.assert_array_equal(gradual(24, 0.0, steepness=0.5), 0)
    np.testing.assert_array_equal(gradual(5, 0.2)[1:], 0.2)


@given(
    tokens=st.integers(0, 100_000),
    layers=st.integers(1, 80),
    ratio=RATIOS,
    steepness=st.floats(0, 1),
    first=st.integers(1, 4),
)
def test_counts_add_up_and_fall(tokens, layers, ratio, steepness, first):
    shares = gradual(layers, ratio, first, steepness)
    whole = counts(shares, tokens)
    assert whole.dtype == np.int64
    assert whole.sum() == pytest.approx(ratio * tokens * max(layers - first, 0), abs=1)
    assert ((whole >= 0) & (whole <= tokens)).all()
    assert (np.diff(whole[first:]) <= 0).all()
    assert (np.abs(whole - shares * tokens) <= 1 + 1e-6).all()
    if ratio == 1:
        assert (whole[first:] == tokens).all()


def test_counts_of_no_layers():
    assert counts(np.zeros(0), 10).shape == (0,)
