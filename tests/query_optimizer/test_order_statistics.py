"""Bounds of a quantile against exact binomials and drawn samples; shares of a budget against every choice there is."""

import math
from fractions import Fraction
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from query_optimizer.order_statistics import joint_bounds, lower_bound, lower_rank, rank_of_bound, share_out, upper_bound

DISTRIBUTIONS = {
    "uniform": (lambda rng, size: rng.random(size), 0.95),
    "exponential": (lambda rng, size: rng.exponential(size=size), math.log(20)),
    "cauchy": (lambda rng, size: rng.standard_cauchy(size), math.tan(math.pi * 0.45)),
    "rare outliers": (lambda rng, size: (rng.random(size) < 0.049) * 1e6, 0.0),
    "outliers that just count": (lambda rng, size: (rng.random(size) < 0.0501) * 1e6, 1e6),
}


def chances_below(n, quantile):
    """By rank from 0 on, the chance that so many samples of n or more lie below the quantile, as exact fractions."""
    p = Fraction(quantile).limit_denominator(10**6)
    chances = [math.comb(n, r) * p**r * (1 - p) ** (n - r) for r in range(n + 1)]
    return list(accumulate(reversed(chances)))[::-1]


def test_fewer_than_59_samples_bound_no_95th_percentile():
    assert rank_of_bound(0) is None
    assert rank_of_bound(58) is None
    assert rank_of_bound(59) == 59
    assert rank_of_bound(92) == 92
    assert rank_of_bound(93) == 92
    assert np.isposinf(upper_bound(np.zeros((58, 3)))).all()
    assert (upper_bound(np.zeros((59, 3))) == 0).all()


@given(st.integers(1, 150), st.sampled_from([0.5, 0.9, 0.95, 0.99375]), st.sampled_from([0.8, 0.95, 0.999]))
@example(1, 0.95, 0.95)
def test_ranks_are_what_exact_fractions_say(n, quantile, confidence):
    chances, doubt = chances_below(n, quantile), 1 - Fraction(confidence).limit_denominator(1000)
    enough = [rank for rank in range(1, n + 1) if chances[rank] <= doubt]
    assert rank_of_bound(n, quantile, confidence) == min(enough, default=None)
    too_many = [rank for rank in range(1, n + 1) if 1 - chances[rank] <= doubt]
    assert lower_rank(n, quantile, confidence) == max(too_many, default=None)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("n", [59, 93, 400])
def test_bounds_hold_in_95_of_100_draws_whatever_is_drawn(name, n, rng):
    draw, quantile = DISTRIBUTIONS[name]
    draws = 1500
    samples = draw(rng, (n, draws))
    noise = 4 * math.sqrt(0.05 * 0.95 / draws)
    assert np.mean(upper_bound(samples) >= quantile) >= 0.95 - noise
    assert np.mean(lower_bound(samples) <= quantile) >= 0.95 - noise


def test_a_bound_of_one_sample_less_would_not_hold(rng):
    samples = np.sort(rng.random((59, 4000)), axis=0)
    assert np.mean(samples[57] >= 0.95) < 0.9


def test_nan_and_infinity_are_the_largest_samples():
    samples = np.zeros((93, 3), np.float32)
    samples[:1, 1], samples[:2, 2] = np.nan, np.inf
    assert upper_bound(samples).tolist() == [0, 0, np.inf]
    assert upper_bound(samples).dtype == np.float64
    assert upper_bound(samples[:0]).tolist() == [np.inf] * 3
    assert lower_bound(samples[:0]).tolist() == [-np.inf] * 3
    assert lower_bound(np.full((59, 1), np.nan)).tolist() == [np.inf]


@pytest.mark.parametrize("numbers", [(0.0, 0.95), (1.0, 0.95), (math.nan, 0.95), (0.95, 0.0), (0.95, 1.0), (0.95, math.nan)])
def test_quantile_and_confidence_are_shares(numbers):
    with pytest.raises(ValueError, match="between 0 and 1"):
        rank_of_bound(100, *numbers)


def test_ranks_of_many_samples_are_near_the_quantile():
    assert 0.95 < rank_of_bound(20_000) / 20_000 < 0.954
    assert 0.946 < lower_rank(20_000) / 20_000 < 0.95


def joint_bound(groups):
    """The bound for all heads together. groups: errors of heads, `[n, heads]`, a row for each query."""
    return math.hypot(*joint_bounds([np.sqrt((group**2).sum(axis=1)) for group in groups]))


@given(st.lists(st.integers(1, 8), max_size=3), st.integers(59, 400), st.booleans())
def test_a_joint_bound_is_that_of_rows_and_no_less_than_that_of_any_head(heads, n, few):
    rng = np.random.default_rng(n)
    groups = [rng.exponential(0.01, (n if few else 20 * n, count)) for count in heads]
    bound = joint_bound(groups)
    if len(groups) == 1:
        assert bound == upper_bound(np.sqrt((groups[0] ** 2).sum(axis=1)))
    for group in groups:
        assert bound >= upper_bound(group).max()
    assert joint_bound([*groups, np.zeros((4000, 1))]) >= bound
    assert bound < 1 or few


def test_heads_that_err_at_different_times_are_over_their_bounds_together(rng):
    """Each of eight heads errs in 3 % of its queries: no head's 95th percentile shows it, and every fifth answer is wrong."""
    errors = (rng.random((2000, 8)) < 0.03) * 0.5
    assert not upper_bound(errors).any()
    assert joint_bound([errors]) >= 0.5
    assert joint_bound([errors[:, :4], errors[:, 4:]]) >= 0.5


@pytest.mark.parametrize("ways", [1, 2])
def test_a_joint_bound_holds_in_95_of_100_draws(ways, rng):
    draws, n, heads = 400, 300, 4
    layer = np.sqrt((rng.standard_cauchy((200_000, ways * heads)) ** 2).sum(axis=1))
    quantile = np.quantile(layer, 0.95)
    held = [joint_bound(list(rng.standard_cauchy((ways, n, heads)))) >= quantile * 0.99 for _ in range(draws)]
    assert np.mean(held) >= 0.95 - 4 * math.sqrt(0.05 * 0.95 / draws)


# Sharing a budget ---------------------------------------------------------------------------------------------------------


@st.composite
def heads(draw, heads_max=4, options_max=4):
    """Options of some heads, `[heads, options, 2]`: one is exact, wherever it stands, and some are not there."""
    count, options = draw(st.integers(1, heads_max)), draw(st.integers(1, options_max))
    error = st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, math.inf]) | st.floats(1e-4, 1.0)
    pairs = np.array(
        [[[draw(st.floats(0.01, 10)), draw(error)] for _ in range(options)] for _ in range(count)], np.float64
    ).reshape(count, options, 2)
    for head in range(count):
        pairs[head, draw(st.integers(0, options - 1)), 1] = 0
    return pairs


def seconds_and_cost(pairs, choice):
    rows = np.arange(len(pairs))
    return pairs[rows, choice, 0].sum(), (pairs[rows, choice, 1] ** 2).sum()


def exact_seconds(pairs):
    return sum(min(seconds for seconds, error in head if error == 0) for head in pairs)


def best_seconds(pairs, budget):
    """The fewest seconds, by trying every choice."""
    choices = np.array(list(product(range(pairs.shape[1]), repeat=len(pairs))))
    chosen = pairs[np.arange(len(pairs)), choices]
    affordable = (chosen[..., 1] ** 2).sum(1) <= budget**2 * (1 + 1e-9)
    return chosen[affordable, :, 0].sum(1).min()


@given(heads(), st.floats(0, 1.5))
def test_no_budget_is_overspent_and_a_third_of_what_can_be_saved_is(pairs, budget):
    seconds, cost = seconds_and_cost(pairs, share_out(budget, pairs))
    assert cost <= budget**2 * (1 + 1e-9)
    exact = exact_seconds(pairs)
    assert seconds <= exact * (1 + 1e-9)
    assert exact - seconds >= (exact - best_seconds(pairs, budget)) / 3 - 1e-9


@given(heads(heads_max=12, options_max=8), st.lists(st.floats(0, 3), min_size=2, max_size=20))
def test_more_budget_never_takes_more_seconds(pairs, budgets):
    seconds = [seconds_and_cost(pairs, share_out(budget, pairs))[0] for budget in sorted(budgets)]
    assert all(more <= less + 1e-9 for less, more in pairwise(seconds))


def test_what_is_saved_is_mostly_all_that_can_be(rng):
    """Options as ways of answering have them: each next one takes less and errs more."""
    shares = []
    for _ in range(100):
        pairs = np.stack([np.sort(rng.lognormal(size=(4, 4)))[:, ::-1], np.sort(rng.lognormal(-4, 1.5, (4, 4)))], axis=2)
        pairs[:, 0, 1] = 0
        budget = rng.choice([0.01, 0.03, 0.1])
        exact = exact_seconds(pairs)
        possible = exact - best_seconds(pairs, budget)
        saved = exact - seconds_and_cost(pairs, share_out(budget, pairs))[0]
        shares.append(saved / possible if possible > 1e-9 else 1.0)
    assert np.median(shares) > 0.99
    assert np.mean(shares) > 0.9


def test_the_budget_goes_where_it_saves_most():
    pairs = [[(10, 0), (1, 0.03)], [(10, 0), (9, 0.03)], [(10, 0), (1, 0.04)]]
    assert share_out(0.03, pairs).tolist() == [1, 0, 0]
    assert share_out(0.05, pairs).tolist() == [1, 0, 1]
    assert share_out(1.0, pairs).tolist() == [1, 1, 1]
    assert share_out(0.0, pairs).tolist() == [0, 0, 0]


def test_a_way_without_error_needs_no_budget():
    assert share_out(0.0, [[(10, 0), (2, 0)]]).tolist() == [1]


@pytest.mark.parametrize("budget", [-0.1, math.nan, math.inf])
def test_a_budget_is_a_number(budget):
    with pytest.raises(ValueError, match="budget"):
        share_out(budget, [[(1, 0)]])


def test_every_head_has_an_exact_option():
    with pytest.raises(ValueError, match="without error"):
        share_out(0.1, [[(1, 0)], [(1, 0.05)]])
