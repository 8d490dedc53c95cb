"""What deviates has a score; what cannot be known has the highest."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdb.blend.deviation import DEFAULT_SCORE, SCORES, deviation, spread
from kvdb.errors import InvalidArgument

EVERY_SCORE = pytest.mark.parametrize("score", SCORES)


def kv(seed=0, n=20):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((2, n, 8)).astype(np.float32) for _ in "kv")


@EVERY_SCORE
def test_equal_kv_does_not_deviate(score):
    k, v = kv()
    np.testing.assert_array_equal(deviation(k, v, k, v, score), 0)


@EVERY_SCORE
def test_the_token_that_moved_stands_out(score):
    k, v = kv()
    fresh_k, fresh_v = k.copy(), v.copy()
    fresh_k[1, 7] += 1
    fresh_v[1, 7] -= 1
    scores = deviation(fresh_k, fresh_v, k, v, score)
    assert scores.dtype == np.float32
    assert scores[7] > 0
    np.testing.assert_array_equal(np.delete(scores, 7), 0)


@pytest.mark.parametrize(
    ("score", "k_counts", "v_counts"), [("keys", 1, 0), ("values", 0, 1), ("both", 1, 1), ("absolute", 1, 1)]
)
def test_each_looks_at_what_its_name_says(score, k_counts, v_counts):
    k, v = kv()
    assert (deviation(2 * k, v, k, v, score) > 0).all() == k_counts
    assert (deviation(k, 2 * v, k, v, score) > 0).all() == v_counts


def test_a_product_is_small_unless_keys_and_values_moved():
    k, v = kv()
    fresh_k, fresh_v = k + 0.5, v + 0.5
    alone = deviation(fresh_k, v, k, v, "product")
    np.testing.assert_array_equal(alone, 0)
    expected = deviation(fresh_k, v, k, v, "keys") * deviation(k, fresh_v, k, v, "values")
    np.testing.assert_allclose(deviation(fresh_k, fresh_v, k, v, "product"), expected, rtol=1e-6)


def test_a_moved_key_counts_by_the_value_that_it_lets_in():
    k, v = kv()
    quiet = v.copy()
    quiet[:, 0] *= 1e-3
    scores = deviation(k + 0.5, quiet, k, quiet, "weighted")
    assert scores[0] < 0.01 * scores[1:].min()
    np.testing.assert_array_equal(deviation(k, v + 1, k, v, "weighted"), 0)


def test_both_is_the_sum_of_relative_norms():
    (k, v), (fresh_k, fresh_v) = kv(0), kv(1)

    def relative(fresh, stored):
        norms = [np.linalg.norm(x.transpose(1, 0, 2).reshape(20, 16), axis=1) for x in (fresh - stored, fresh, stored)]
        return norms[0] / np.maximum(norms[1], norms[2])

    expected = relative(fresh_k, k) + relative(fresh_v, v)
    np.testing.assert_allclose(deviation(fresh_k, fresh_v, k, v, "both"), expected, rtol=1e-5)
    np.testing.assert_array_equal(deviation(fresh_k, fresh_v, k, v), deviation(fresh_k, fresh_v, k, v, DEFAULT_SCORE))


def test_absolute_grows_with_the_vectors_and_relative_does_not():
    (k, v), (fresh_k, fresh_v) = kv(0), kv(1)
    once, thrice = ([scale * x for x in (fresh_k, fresh_v, k, v)] for scale in (1, 3))
    np.testing.assert_allclose(deviation(*thrice, "absolute"), 3 * deviation(*once, "absolute"), rtol=1e-5)
    for score in ("keys", "values", "both", "mean", "head"):
        np.testing.assert_allclose(deviation(*thrice, score), deviation(*once, score), rtol=1e-5)


def test_mean_counts_keys_and_values_alike_and_short_vectors_less():
    k, v = np.ones((1, 2, 8), np.float32), np.ones((1, 2, 8), np.float32)
    k[:, 1] = 1e-3
    first, second = deviation(2 * k, v, k, v, "mean")
    assert first == pytest.approx(1000 * second, rel=1e-4)
    np.testing.assert_allclose(deviation(k, 2 * v, k, v, "mean"), deviation(k, 200 * v, k, 100 * v, "mean"), rtol=1e-5)


def test_head_sees_one_head_among_many_that_stand_still():
    rng = np.random.default_rng(0)
    stored = rng.standard_normal((16, 2, 8)).astype(np.float32)
    fresh = stored.copy()
    fresh[3, 0] *= 1.5  # one head moves much
    fresh[:, 1] *= 1.2  # all move a little
    head, both = (deviation(fresh, fresh, stored, stored, score) for score in ("head", "both"))
    assert head[0] > head[1]
    assert both[0] < both[1]


@EVERY_SCORE
def test_zero_keys_and_values_are_safe(score):
    k, v = kv()
    zero = np.zeros_like(k)
    np.testing.assert_array_equal(deviation(zero, zero, zero, zero, score), 0)
    for fresh, stored in (((k, v), (zero, zero)), ((zero, zero), (k, v))):
        scores = deviation(*fresh, *stored, score)
        assert np.isfinite(scores).all()
        assert (scores > 0).all()


@EVERY_SCORE
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("stored", [False, True])
def test_what_is_not_finite_has_the_highest_score(score, poison, stored):
    k, v = kv()
    arrays = [x.copy() for x in (k, v, k, v)]
    for array in arrays[2:] if stored else arrays[:2]:
        array[0, 3, 5] = poison
    scores = deviation(*arrays, score)
    assert not np.isnan(scores).any()
    assert np.isposinf(scores[3])
    assert np.isfinite(np.delete(scores, 3)).all()


@EVERY_SCORE
def test_no_tokens_have_no_scores(score):
    k, v = kv(n=0)
    assert deviation(k, v, k, v, score).shape == (0,)


def test_other_dtypes_are_taken():
    k, v = (x.astype(ml_dtypes.bfloat16) for x in kv())
    assert deviation(k, v, -k, v).dtype == np.float32
    np.testing.assert_allclose(deviation(k, v, -k, v, "keys"), 2, rtol=1e-5)


@pytest.mark.parametrize("name", ["", "Both", "key", 3, ["both"]])
def test_an_unknown_score_is_refused(name):
    k, v = kv()
    with pytest.raises(InvalidArgument, match=r"expected one of keys, values, both, product, weighted, absolute"):
        deviation(k, v, k, v, name)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.one_of(st.floats(0, 9, width=32), st.just(float("inf")))), max_size=70),
    st.integers(0, 200),
)
def test_spread_is_the_largest_of_those_before(given_tokens, width):
    positions = np.cumsum([gap for gap, _ in given_tokens]).astype(np.int64)
    scores = np.array([score for _, score in given_tokens], np.float32)
    expected = scores.copy()
    for i in range(len(scores)):
        near = (positions[: i + 1] >= positions[i] - width) & np.isfinite(scores[: i + 1])
        if np.isfinite(scores[i]):
            expected[i] = scores[: i + 1][near].max()
    got = spread(scores, positions, width)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)


def test_spread_over_nothing_is_nothing():
    scores = np.array([1, 5, 2, np.inf, 0], np.float32)
    np.testing.assert_array_equal(spread(scores, np.arange(5), 0), scores)
