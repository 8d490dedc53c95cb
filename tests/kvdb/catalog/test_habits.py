"""What ways erred over the segments of a model, and what that is worth to the next one."""

import numpy as np
import pytest

import kvdb
from kvdb.catalog.evidence.evidence import Evidence
from kvdb.catalog.evidence.habits import CONTEXTS_MAX, MODELS_MAX, Habits, ModelHabits
from kvdb.catalog.evidence.way_record import WITHDRAWN_QUERIES
from query_optimizer.habit import HABIT_AUDITS_MIN, audits_needed
from query_optimizer.order_statistics import AUDITS_MIN
from tests.kvdb.catalog.test_evidence import HEADS, WAY, audit, prove

SPEC = kvdb.ModelSpec("m", layers=1, q_heads=3, kv_heads=3, head_dim=8, dtype="float32")
TOKENS = 8000
LIMITS = np.full(HEADS, 0.01)


@pytest.fixture
def habits():
    return ModelHabits()


def segment(habits, number, tokens=TOKENS):
    evidence = Evidence()
    evidence.adopt(habits, number, tokens)
    return evidence


def proven(evidence):
    return WAY in evidence.of(0) and np.isfinite(evidence.of(0)[WAY].bounds).all()


def audits_until_proven(evidence, error=0.001):
    for number in range(1, 100):
        evidence.add(0, WAY, audit(error))
        if proven(evidence):
            return number
    return None


def test_a_way_that_many_contexts_proved_is_proven_by_a_third_of_the_audits(habits):
    for number in range(11):
        prove(segment(habits, number))
    new = segment(habits, 11)
    version = new.version
    assert new.audits_needed(0, HEADS, 0.01) == HABIT_AUDITS_MIN
    assert audits_until_proven(new) == HABIT_AUDITS_MIN
    assert new.version > version, "plans are made anew"


def test_a_third_context_needs_two_thirds_of_them(habits):
    assert [audits_until_proven(segment(habits, number)) for number in range(3)] == [
        AUDITS_MIN,
        audits_needed(1),
        audits_needed(1),
    ], "the second did not tell enough to count"
    prove(segment(habits, 4))
    assert audits_until_proven(segment(habits, 5)) == audits_needed(2) == 40


def test_a_context_that_is_not_like_the_others_is_not_proven_by_them(habits):
    for number in range(11):
        prove(segment(habits, number))
    new = segment(habits, 11)
    for number in range(AUDITS_MIN):
        new.add(0, WAY, audit(0.5 if number % 8 == 3 else 0.001))
        assert not (new.of(0)[WAY].bounds <= LIMITS).any() or number < 3
    assert segment(habits, 12).audits_needed(0, HEADS, 0.01) == AUDITS_MIN, "and from then on they speak for no other one"


def test_a_head_that_broke_its_word_is_proven_by_itself_again(habits):
    for number in range(11):
        prove(segment(habits, number))
    new = segment(habits, 11)
    audits_until_proven(new)
    new.add(0, WAY, audit([0.5, 0.001, 0.001]), LIMITS)
    assert list(np.isfinite(new.of(0)[WAY].bounds)) == [False, True, True]
    assert not np.isfinite(segment(habits, 12).of(0).get(WAY, new.of(0)[WAY]).bounds[0])
    new.count_queries(0, WITHDRAWN_QUERIES)
    for _ in range(AUDITS_MIN - 1):
        new.add(0, WAY, audit(0.001))
        assert not np.isfinite(new.of(0)[WAY].bounds[0])
    new.add(0, WAY, audit(0.001))
    assert np.isfinite(new.of(0)[WAY].bounds[0])


def test_contexts_of_other_lengths_and_the_same_one_tell_nothing(habits):
    for number in range(11):
        prove(segment(habits, number))
    assert segment(habits, 20, 5 * TOKENS).audits_needed(0, HEADS, 0.01) == AUDITS_MIN
    assert segment(habits, 21, TOKENS // 5).audits_needed(0, HEADS, 0.01) == AUDITS_MIN
    assert segment(habits, 22, 2 * TOKENS).audits_needed(0, HEADS, 0.01) == HABIT_AUDITS_MIN
    assert segment(habits, 0).audits_needed(0, HEADS, 0.01) == audits_needed(10)


def test_evidence_that_comes_back_from_disk_speaks_for_others_again(habits):
    evidence = Evidence()
    prove(evidence)
    records = evidence.take()
    other = segment(habits, 1)
    assert segment(habits, 2).audits_needed(0, HEADS, 0.01) == AUDITS_MIN
    other.restore(records)
    assert segment(habits, 2).audits_needed(0, HEADS, 0.01) == audits_needed(1)


def test_what_is_kept_is_bounded(habits):
    for number in range(3 * CONTEXTS_MAX):
        prove(segment(habits, number))
    assert len(habits._known[0, WAY]) == CONTEXTS_MAX
    all_models = Habits()
    first = all_models.of(SPEC, "")
    assert all_models.of(SPEC, "") is first
    assert all_models.of(SPEC, "another tenant") is not first
    for number in range(MODELS_MAX):
        all_models.of(SPEC, str(number))
    assert len(all_models._models) == MODELS_MAX
