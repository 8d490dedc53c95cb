"""Evidence of how wrong ways of answering are: what is proven, what is withdrawn, and when it is forgotten."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexes.retrieval import Dipr, TopK
from kvdb.attention.signs import SIGNS
from kvdb.catalog.evidence.evidence import Evidence
from kvdb.catalog.evidence.way_record import RANGE_AUDITS, SAMPLES_MAX, STALE_QUERIES, WITHDRAWN_QUERIES, Audit
from query_optimizer.order_statistics import AUDITS_MIN, lower_bound, upper_bound
from query_optimizer.ways import Way

WAY, OTHER = Way("flat", Dipr()), Way("coarse-clusters", TopK(64), estimate_tail=True)
HEADS = 3
JOINED = ("errors", "missed", "given_up")


def audit(errors, missed=-9.0, heads=None, time_share=0.2, sign=0.0):
    """An audit of one query. errors, sign: one for each KV head, or for all."""
    errors = np.broadcast_to(np.float32(errors), HEADS).reshape(HEADS, 1).copy()
    mask = np.ones(HEADS, np.bool_) if heads is None else np.isin(np.arange(HEADS), heads)
    missed = np.broadcast_to(np.float32(missed), HEADS).reshape(HEADS, 1).copy()
    signs = np.broadcast_to(np.float32(sign), (SIGNS, HEADS))[..., None].copy()
    return Audit(errors, missed, signs, mask, np.zeros((HEADS, 1), np.bool_), time_share)


def prove(evidence, error=0.001, way=WAY, **changed):
    for _ in range(AUDITS_MIN):
        evidence.add(0, way, audit(error, **changed))


@given(
    st.lists(st.tuples(st.floats(0, 0.25, width=32), st.floats(-1, 1, width=32)), min_size=20, max_size=90), st.integers(2, 20)
)
def test_queries_that_are_compared_together_count_one_by_one(asked, at_once):
    """But for what they are unlike: that is what was seen before all of them."""
    alone, together = Evidence(), Evidence()
    audits = [audit([error, error / 2, 0.001], sign=sign) for error, sign in asked]
    for one in audits:
        alone.add(0, WAY, one)
    for begin in range(0, len(audits), at_once):
        some = audits[begin : begin + at_once]
        errors, missed, given_up = (np.concatenate([getattr(one, name) for one in some], axis=1) for name in JOINED)
        signs = np.concatenate([one.signs for one in some], axis=2)
        together.add(0, WAY, Audit(errors, missed, signs, some[0].heads, given_up, 0.2))
    known, of_each = together.of(0)[WAY], alone.of(0)[WAY]
    unlike = [record.unlike_counts.sum() for record in (together._records[0][WAY], alone._records[0][WAY])]
    if not any(unlike):
        assert (known.audits == of_each.audits).all()
        assert (known.bounds == of_each.bounds).all()
        assert (known.ranges == of_each.ranges).all()
        assert (known.rows == of_each.rows).all()
    assert (known.audits + together._records[0][WAY].unlike_counts).max() <= len(asked)


def test_nothing_is_proven_before_there_are_audits_enough():
    evidence = Evidence()
    for number in range(AUDITS_MIN):
        assert evidence.version == 0
        assert WAY not in evidence.of(0) or not np.isfinite(evidence.of(0)[WAY].bounds).any()
        evidence.add(0, WAY, audit([0.001, 0.002, number / 1000]))
    known = evidence.of(0)[WAY]
    assert np.allclose(known.bounds, [0.001, 0.002, (AUDITS_MIN - 1) / 1000])
    assert (known.audits == AUDITS_MIN).all()
    assert evidence.version == 1
    assert evidence.of(1) == {}
    assert OTHER not in evidence.of(0)
    assert evidence.layers() == [0]


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=400), st.integers(1, 4))
def test_bounds_are_those_of_the_last_audits(errors, at_once):
    evidence = Evidence()
    for begin in range(0, len(errors), at_once):
        piece = np.broadcast_to(np.float32(errors[begin : begin + at_once]), (HEADS, len(errors[begin : begin + at_once])))
        evidence.add(
            0,
            WAY,
            Audit(
                piece.copy(),
                -piece,
                np.zeros((SIGNS, HEADS, piece.shape[1]), np.float32),
                np.ones(HEADS, np.bool_),
                np.zeros(piece.shape, np.bool_),
            ),
        )
    last = np.float32(errors[-SAMPLES_MAX:])
    known = evidence.of(0)[WAY]
    assert (known.bounds == upper_bound(last)).all()
    assert (known.least == lower_bound(last)).all()
    assert np.allclose(known.median, np.median(last))
    assert (known.largest == last.max()).all()
    assert (known.guards == -last.min()).all()
    assert known.time_share is None


def test_rows_are_those_of_complete_audits():
    evidence = Evidence()
    evidence.add(0, WAY, audit([0.1, 0.2, 0.3]))
    evidence.add(0, WAY, audit(0.5, heads=[1]))
    evidence.add(0, WAY, replace(audit(0.7, heads=[2]), complete=False))
    expected = np.float32([[0.1, 0.2, 0.3], [np.nan, 0.5, np.nan]])
    assert np.array_equal(evidence.of(0)[WAY].rows, expected, equal_nan=True)
    for _ in range(SAMPLES_MAX):
        evidence.add(0, WAY, audit(0.1))
    assert evidence.of(0)[WAY].rows.shape == (SAMPLES_MAX, HEADS)
    evidence.add(0, WAY, audit([0.1, 0.1, 5]), np.full(HEADS, 0.2))
    evidence.add(0, WAY, audit([0.1, 0.1, 5]), np.full(HEADS, 0.2))
    assert np.isnan(evidence.of(0)[WAY].rows).any(axis=0).tolist() == [False, False, True], "what is withdrawn is forgotten"


def test_an_audit_of_some_heads_counts_for_these():
    evidence = Evidence()
    prove(evidence)
    for _ in range(5):
        evidence.add(0, WAY, audit(0.5, missed=-1, heads=[1], time_share=None))
    known = evidence.of(0)[WAY]
    assert known.audits.tolist() == [AUDITS_MIN, AUDITS_MIN + 5, AUDITS_MIN]
    assert known.largest.tolist() == pytest.approx([0.001, 0.5, 0.001])
    assert known.guards.tolist() == [-9, -1, -9]
    assert known.time_share == pytest.approx(0.2)


def test_times_that_other_work_stretched_do_not_make_a_way_slow():
    evidence = Evidence()
    prove(evidence)
    for time_share in (0.2, 2.0, 3.0) * AUDITS_MIN:
        evidence.add(0, WAY, audit(0.001, time_share=time_share))
    assert evidence.of(0)[WAY].time_share == pytest.approx(0.2)


def test_a_head_that_breaks_its_share_is_withdrawn_at_once_where_the_proof_breaks_with_it():
    evidence = Evidence()
    prove(evidence)
    version = evidence.version
    suspects = evidence.add(0, WAY, audit([0.001, 0.02, 0.001]), limits=np.full(HEADS, 0.01))
    assert not suspects.any()
    known = evidence.of(0)[WAY]
    assert np.isfinite(known.bounds).tolist() == [True, False, True]
    assert known.waits.tolist() == [False, True, False]
    assert known.audits.tolist() == [AUDITS_MIN + 1, 0, AUDITS_MIN + 1]
    assert evidence.version > version


def test_one_fault_of_many_audits_makes_a_suspect_and_two_of_the_last_few_withdraw():
    evidence = Evidence()
    for _ in range(4):
        prove(evidence)
    limits = np.full(HEADS, 0.01)
    assert evidence.add(0, WAY, audit([0.001, 0.001, 0.02]), limits).tolist() == [False, False, True]
    assert np.isfinite(evidence.of(0)[WAY].bounds).all()
    assert not evidence.add(0, WAY, audit(0.001), limits).any()
    assert not evidence.add(0, WAY, audit([0.001, 0.001, 0.02]), limits).any()
    assert evidence.of(0)[WAY].waits.tolist() == [False, False, True]


def test_what_is_withdrawn_waits_each_time_for_twice_as_many_queries():
    evidence, limits = Evidence(), np.full(HEADS, 0.01)
    for waits in (WITHDRAWN_QUERIES, 2 * WITHDRAWN_QUERIES, 4 * WITHDRAWN_QUERIES):
        prove(evidence)
        evidence.add(0, WAY, audit(0.5), limits)
        evidence.count_queries(0, waits - 1)
        assert evidence.of(0)[WAY].waits.all()
        evidence.count_queries(1, 1)
        assert evidence.of(0)[WAY].waits.all(), "queries of another layer do not count"
        evidence.count_queries(0, 1)
        assert not evidence.of(0)[WAY].waits.any()


def test_audits_are_forgotten_without_others():
    evidence = Evidence()
    for stale in (STALE_QUERIES, 2 * STALE_QUERIES):
        prove(evidence)
        evidence.count_queries(0, stale)
        evidence.add(0, WAY, audit(0.001, heads=[0]))
        assert np.isfinite(evidence.of(0)[WAY].bounds).all()
        evidence.count_queries(0, 1)
        assert np.isfinite(evidence.of(0)[WAY].bounds).tolist() == [True, False, False]
        evidence.count_queries(0, 2 * stale)
        assert not np.isfinite(evidence.of(0)[WAY].bounds).any()


@pytest.mark.parametrize("error", [np.nan, np.inf])
def test_an_answer_that_cannot_be_compared_proves_nothing(error):
    evidence = Evidence()
    prove(evidence, error)
    assert not np.isfinite(evidence.of(0)[WAY].bounds).any()


def test_it_is_told_and_asked_by_several_threads():
    evidence, failures = Evidence(), []

    def tell(way):
        try:
            for number in range(200):
                evidence.add(number % 3, way, audit(0.001), np.full(HEADS, 0.01))
                evidence.count_queries(number % 3, 1)
                for layer in evidence.layers():
                    evidence.of(layer)
        except RuntimeError as error:
            failures.append(error)

    threads = [threading.Thread(target=tell, args=(way,)) for way in (WAY, OTHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert evidence.of(0)[WAY].audits.tolist() == [67] * HEADS


LIMITS = np.full(HEADS, 0.01)


def test_a_query_like_those_of_the_proof_lies_no_farther_out_than_half_of_what_they_span():
    evidence = Evidence()
    for number in range(AUDITS_MIN):
        evidence.add(0, WAY, audit(0.001, sign=[number % 2, 5, np.nan]))
    least, most = evidence.of(0)[WAY].ranges
    assert np.allclose(least[:, :2], [-0.5, 4.9])
    assert np.allclose(most[:, :2], [1.5, 5.1])
    assert np.isinf(least[:, 2]).all(), "nothing is known of what was read whole"


def test_everything_is_in_range_before_there_are_audits_enough():
    evidence = Evidence()
    for number in range(RANGE_AUDITS):
        evidence.add(0, WAY, audit(0.001, sign=number**3))
        assert np.isinf(evidence.of(0)[WAY].ranges).all() == (number < RANGE_AUDITS - 1)
    assert (evidence.of(0)[WAY].audits == RANGE_AUDITS).all()


def test_queries_unlike_those_of_the_proof_count_once_they_are_a_proof_of_their_own():
    evidence = Evidence()
    prove(evidence)
    for number in range(AUDITS_MIN):
        known = evidence.of(0)[WAY]
        assert (known.audits == AUDITS_MIN).all()
        assert (known.ranges[1] < 1).all(), "a few are no proof"
        version = evidence.version
        evidence.add(0, WAY, replace(audit(0.002, sign=3 + number / 100), chosen=True), LIMITS)
    known = evidence.of(0)[WAY]
    assert evidence.version > version, "plans have to know"
    assert (known.audits == 2 * AUDITS_MIN).all()
    assert (known.ranges[0] < 0).all()
    assert (known.ranges[1] > 3.5).all()


def test_unlike_queries_that_are_over_their_limit_stay_out_and_end_a_way_that_meets_hardly_any_others():
    for between, stays in ((1, False), (10, True)):
        evidence = Evidence()
        prove(evidence)
        for number in range(AUDITS_MIN):
            assert np.isfinite(evidence.of(0)[WAY].bounds).all()
            evidence.count_queries(0, between)
            evidence.add(0, WAY, replace(audit(0.02 if number % 4 == 0 else 0.001, sign=3), chosen=True), LIMITS)
        known = evidence.of(0)[WAY]
        assert np.isfinite(known.bounds).all() == stays
        assert known.waits.all() != stays
        if stays:
            assert (known.ranges[1] < 1).all()


def test_a_change_before_the_proof_is_done_begins_it_anew():
    """Fifty audits of one kind and nine of another prove neither; fifty-nine of the other prove that one alone."""
    evidence = Evidence()
    for _ in range(AUDITS_MIN - 9):
        evidence.add(0, WAY, audit(0.001))
    for _ in range(AUDITS_MIN):
        assert not np.isfinite(evidence.of(0)[WAY].bounds).any()
        evidence.add(0, WAY, audit(0.004, sign=3))
    known = evidence.of(0)[WAY]
    assert np.allclose(known.bounds, 0.004)
    assert (known.ranges[0] > 2).all()


def test_unlike_heads_err_nothing_together_because_they_are_read_whole():
    evidence = Evidence()
    prove(evidence)
    assert not evidence.add(0, WAY, audit([0.5, 0.001, 0.001], sign=[3, 0, 0]), LIMITS).any()
    known = evidence.of(0)[WAY]
    assert np.allclose(known.rows[-1], [0, 0.001, 0.001])
    assert np.isfinite(known.bounds).all()


def test_unlike_queries_that_a_guard_has_read_whole_are_counted_too():
    """Otherwise a way would never end whose every query is read whole."""
    evidence = Evidence()
    prove(evidence)
    for number in range(AUDITS_MIN):
        evidence.count_queries(0, 1)
        version, one = evidence.version, audit(0.0 if number % 4 else 0.02, sign=3)
        evidence.add(0, WAY, replace(one, given_up=one.errors == 0, chosen=True), LIMITS)
        assert evidence.version == version or number == AUDITS_MIN - 1
    assert evidence.of(0)[WAY].waits.all()
