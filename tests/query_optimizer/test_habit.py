"""What other contexts say of a way: how few audits prove it in a new one, and how often that is wrong."""

from math import inf

import numpy as np
import pytest

from indexes.retrieval import Dipr
from query_optimizer.habit import HABIT_AUDITS_MIN, NO_HABIT, Habit, OtherContext, audits_needed
from query_optimizer.head_shares import Joint, share_budget
from query_optimizer.order_statistics import AUDITS_MIN, QUANTILE
from query_optimizer.ways import Way, WayFacts

HEADS = 3
ALL = np.ones(HEADS, np.bool_)


def context(errors=0.001, n=AUDITS_MIN, withdrawn=()):
    rows = np.broadcast_to(np.float32(errors), (n, HEADS)).copy()
    return OtherContext(rows, np.isin(np.arange(HEADS), withdrawn))


def one(head):
    return np.arange(HEADS) == head


def test_the_more_contexts_speak_for_a_way_the_fewer_audits_prove_it():
    needed = [audits_needed(contexts) for contexts in range(40)]
    assert needed[0] == AUDITS_MIN
    assert needed == sorted(needed, reverse=True)
    assert needed[2] == 40
    assert needed[11:] == [HABIT_AUDITS_MIN] * 29
    for contexts, audits in enumerate(needed[1:12], 1):
        assert QUANTILE**audits * (1 / (contexts + 1) + 0.05) <= 0.05


def scales_of_one_kind(rng, shape):
    return rng.lognormal(0, 2, shape)


def scales_of_which_few_are_bad(rng, shape):
    """Every tenth context is a thousand times worse than the others."""
    return np.where(rng.random(shape) < 0.1, 1000.0, 1.0)


def scales_that_are_alike(rng, shape):
    return np.ones(shape)


@pytest.mark.parametrize("scales_of", [scales_of_one_kind, scales_of_which_few_are_bad, scales_that_are_alike])
@pytest.mark.parametrize("contexts", [1, 3, 11, 16])
def test_a_proof_is_wrong_in_at_most_one_of_twenty_contexts(scales_of, contexts):
    """Errors are exponential with a scale of each context; wrong is a bound below the 95th percentile."""
    rng = np.random.default_rng(contexts)
    trials, k = 20_000, audits_needed(contexts)
    scales = scales_of(rng, (trials, contexts + 1))
    others = scales[:, 1:] * rng.exponential(size=(trials, contexts, AUDITS_MIN)).max(axis=2)
    bounds = np.maximum(others.max(axis=1), scales[:, 0] * rng.exponential(size=(trials, k)).max(axis=1))
    wrong = (bounds < -np.log(1 - QUANTILE) * scales[:, 0]).mean()
    assert wrong <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / trials)


def test_the_bound_is_the_largest_of_all_contexts():
    habit = Habit([context([0.001, 0.002, 0.003]), context([0.002, 0.001, 0.003])])
    needed, bound = habit.of(one(0))
    assert (needed, bound) == (40, pytest.approx(0.002))
    assert habit.of(ALL) == (40, pytest.approx(np.sqrt(0.001**2 + 0.002**2 + 0.003**2)))
    assert habit.proves(np.full(39, 0.0001), one(0)) == inf
    assert habit.proves(np.full(40, 0.0001), one(0)) == pytest.approx(0.002)
    assert habit.proves(np.full(40, 0.01), one(0)) == pytest.approx(0.01)
    assert NO_HABIT.proves(np.zeros(AUDITS_MIN - 1), one(0)) == inf


def test_a_context_where_the_way_broke_its_word_speaks_against_it():
    habit = Habit([context(), context(withdrawn=[1])])
    assert habit.of(one(0)) == (40, pytest.approx(0.001))
    assert habit.of(one(1)) == (AUDITS_MIN, inf)
    assert habit.of(ALL) == (AUDITS_MIN, inf)


def test_a_context_where_the_proof_was_given_up_speaks_against_it():
    few = context([0.001, 0.1, 0.001], n=16)
    habit = Habit([context(), context(), few])
    assert habit.of(one(0)) == (40, pytest.approx(0.001)), "that one tells too little to count, and nothing bad"
    assert habit.of(one(1)) == (AUDITS_MIN, inf)


def test_heads_that_were_not_compared_tell_nothing():
    unknown = context([0.001, np.nan, 0.001])
    habit = Habit([context(), unknown])
    assert habit.of(one(0))[0] == audits_needed(2)
    assert habit.of(one(1))[0] == habit.of(ALL)[0] == audits_needed(1)


def test_heads_are_proven_together_by_as_few_audits():
    way = Way("flat", Dipr())
    known = WayFacts(way, (20,) * HEADS, (0.001,) * HEADS, (0.0,) * HEADS, (0.0,) * HEADS, (False,) * HEADS, 0.1)
    rows, habit = np.full((20, HEADS), 0.001, np.float32), Habit([context()] * 11)
    assert all(share.way == way for share in share_budget(0.01, [known], HEADS, [{way: Joint(rows, habit)}]))
    for joint in (Joint(rows), Joint(rows[1:], habit), Joint(rows, Habit([context(0.1)] * 11))):
        assert all(share.way is None for share in share_budget(0.01, [known], HEADS, [{way: joint}]))
