"""What deviates has a score; what cannot be known has the highest."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb.blend.deviation import DEFAULT_SCORE, SCORES, deviation, measured
from kvdb.errors import InvalidArgument

EVERY_SCORE = pytest.mark.parametrize("score", SCORES)


def kv(seed=0, n=20):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((2, n, 8)).astype(np.float32) for _ in "kv")


def scores_of(k, v, stored_k, stored_v, score=None):
    return deviation(measured(k, v, stored_k, stored_v, score), score)


@EVERY_SCORE
def test_equal_kv_does_not_deviate(score):
    k, v = kv()
    np.testing.assert_array_equal(scores_of(k, v, k, v, score), 0)


@EVERY_SCORE
def test_the_token_that_moved_stands_out(score):
    k, v = kv()
    fresh_k, fresh_v = k.copy(), v.copy()
    fresh_k[1, 7] += 1
    fresh_v[1, 7] -= 1
    scores = scores_of(fresh_k, fresh_v, k, v, score)
    assert scores.dtype == np.float32
    assert scores[7] > 0
    np.testing.assert_array_equal(np.delete(scores, 7), 0)


@EVERY_SCORE
def test_keys_that_moved_deviate(score):
    k, v = kv()
    assert (scores_of(2 * k, v, k, v, score) > 0).all()


def test_a_moved_key_counts_by_the_value_that_it_lets_in():
    k, v = kv()
    quiet = v.copy()
    quiet[:, 0] *= 1e-3
    scores = scores_of(k + 0.5, quiet, k, quiet, "weighted")
    assert scores[0] < 0.01 * scores[1:].min()
    np.testing.assert_array_equal(scores_of(k, v + 1, k, v, "weighted"), 0)


def test_relative_is_the_sum_of_relative_norms():
    (k, v), (fresh_k, fresh_v) = kv(0), kv(1)

    def share(fresh, stored):
        norms = [np.linalg.norm(x.transpose(1, 0, 2).reshape(20, 16), axis=1) for x in (fresh - stored, fresh, stored)]
        return norms[0] / np.maximum(norms[1], norms[2])

    expected = share(fresh_k, k) + share(fresh_v, v)
    np.testing.assert_allclose(scores_of(fresh_k, fresh_v, k, v, "relative"), expected, rtol=1e-5)
    np.testing.assert_array_equal(scores_of(fresh_k, fresh_v, k, v), scores_of(fresh_k, fresh_v, k, v, DEFAULT_SCORE))


def test_weighted_is_the_way_of_each_heads_key_by_the_length_of_its_value():
    (k, v), (fresh_k, fresh_v) = kv(0), kv(1)
    length = np.maximum(np.linalg.norm(fresh_v, axis=-1), np.linalg.norm(v, axis=-1))
    size = np.maximum(np.linalg.norm(fresh_k, axis=-1), np.linalg.norm(k, axis=-1))
    expected = (np.linalg.norm(fresh_k - k, axis=-1) * length).sum(axis=0) / (size * length).sum(axis=0).mean()
    np.testing.assert_allclose(scores_of(fresh_k, fresh_v, k, v, "weighted"), expected, rtol=1e-5)


@EVERY_SCORE
def test_scores_do_not_depend_on_how_long_the_vectors_are(score):
    (k, v), (fresh_k, fresh_v) = kv(0), kv(1)
    once, thrice = ([scale * x for x in (fresh_k, fresh_v, k, v)] for scale in (1, 3))
    np.testing.assert_allclose(scores_of(*thrice, score), scores_of(*once, score), rtol=1e-5)


def test_the_mean_of_weighted_is_one_where_all_keys_turn_round():
    k, v = kv()
    assert scores_of(-k, v, k, v, "weighted").mean() == pytest.approx(2, rel=1e-5)
    assert scores_of(np.zeros_like(k), v, k, v, "weighted").mean() == pytest.approx(1, rel=1e-5)


@EVERY_SCORE
def test_zero_keys_and_values_are_safe(score):
    k, v = kv()
    zero = np.zeros_like(k)
    np.testing.assert_array_equal(scores_of(zero, zero, zero, zero, score), 0)
    for fresh, stored in (((k, v), (zero, zero)), ((zero, zero), (k, v))):
        scores = scores_of(*fresh, *stored, score)
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
    scores = scores_of(*arrays, score)
    assert not np.isnan(scores).any()
    assert np.isposinf(scores[3])
    assert np.isfinite(np.delete(scores, 3)).all()


@EVERY_SCORE
@given(st.data(), st.integers(1, 40), st.integers(0, 5))
def test_measures_are_the_same_in_any_pieces(score, data, n, seed):
    """So that a call which travels in several messages has the scores of one that does not."""
    arrays = *kv(seed, n), *kv(seed + 1, n)
    ends = sorted(data.draw(st.sets(st.integers(1, n))) | {n})
    pieces = [measured(*(array[:, at:end] for array in arrays), score) for at, end in zip([0, *ends], ends, strict=False)]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), measured(*arrays, score))


@EVERY_SCORE
def test_no_tokens_have_no_scores(score):
    k, v = kv(n=0)
    assert scores_of(k, v, k, v, score).shape == (0,)


def test_other_dtypes_are_taken():
    k, v = (x.astype(ml_dtypes.bfloat16) for x in kv())
    assert scores_of(k, v, -k, v).dtype == np.float32
    np.testing.assert_allclose(scores_of(k, v, -k, v, "relative"), 2, rtol=1e-5)


@pytest.mark.parametrize("name", ["", "Weighted", "keys", 3, ["relative"]])
def test_an_unknown_score_is_refused(name):
    k, v = kv()
    with pytest.raises(InvalidArgument, match=r"expected one of weighted, relative"):
        scores_of(k, v, k, v, name)
