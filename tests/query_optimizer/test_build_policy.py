"""The policy builds the indexes that pay, over generated numbers."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from query_optimizer.build_policy import BuildPolicy, KindFacts, SegmentFacts

POLICY = BuildPolicy(opened_often=3)
SECONDS = st.floats(1e-6, 1e3)
KINDS = st.lists(
    st.builds(
        KindFacts,
        kind=st.sampled_from(["flat", "bounds", "means", "clusters", "hnsw"]),
        build_seconds=SECONDS,
        saved_seconds=st.floats(-1.0, 1.0),
        nbytes=st.integers(0, 10**6),
        state=st.sampled_from(["missing", "missing", "missing", "building", "built", "failed"]),
    ),
    max_size=5,
    unique_by=lambda kind: kind.kind,
).map(tuple)
FACTS = st.builds(
    SegmentFacts,
    opened=st.integers(0, 10),
    queries=st.integers(0, 10**6),
    queries_in_all=st.integers(0, 10**6),
    kinds=KINDS,
    nbytes=st.integers(0, 10**6),
    nbytes_max=st.none() | st.integers(0, 3 * 10**6),
)


def built(facts):
    return [decision.kind for decision in POLICY.decide(facts) if decision.build]


@given(FACTS)
def test_every_kind_is_decided_once_and_with_a_reason(facts):
    decisions = POLICY.decide(facts)
    assert sorted(decision.kind for decision in decisions) == sorted(kind.kind for kind in facts.kinds)
    assert all(decision.reason for decision in decisions)


@given(FACTS)
def test_the_cheapest_to_build_comes_first_and_each_next_saves_more(facts):
    kinds = {kind.kind: kind for kind in facts.kinds}
    taken = [kinds[name] for name in built(facts)]
    assert [decision.build for decision in POLICY.decide(facts)] == sorted((d.build for d in POLICY.decide(facts)), reverse=True)
    for cheaper, dearer in pairwise(taken):
        assert cheaper.build_seconds <= dearer.build_seconds
        assert cheaper.saved_seconds < dearer.saved_seconds


@given(FACTS)
def test_the_budget_is_never_exceeded(facts):
    if facts.nbytes_max is not None:
        taken = [kind for kind in facts.kinds if kind.kind in built(facts)]
        assert not taken or facts.nbytes + sum(kind.nbytes for kind in taken) <= facts.nbytes_max


@given(FACTS)
def test_only_what_is_missing_and_saves_something_is_built(facts):
    for kind in facts.kinds:
        if kind.kind in built(facts):
            assert kind.state == "missing"
            assert kind.saved_seconds > 0


@given(FACTS, st.integers(0, 10**6), st.integers(0, 10))
def test_more_queries_and_sessions_never_take_anything_back(facts, more, openings):
    later = replace(
        facts, queries=facts.queries + more, queries_in_all=facts.queries_in_all + more, opened=facts.opened + openings
    )
    assert set(built(facts)) <= set(built(later))


@given(FACTS)
def test_what_was_not_asked_is_not_built(facts):
    assert built(replace(facts, queries=0, queries_in_all=0)) == []


@given(SECONDS, st.floats(1e-6, 1.0), st.integers(0, 300))
def test_one_kind_costs_at_most_twice_what_the_future_would_have_chosen(build_seconds, saved, asked):
    """Ski rental: queries come until nobody knows when; what was lost to a slow answer and to building is counted."""
    queries = lost = 0
    there = False
    for _ in range(asked):
        lost += 0 if there else saved
        queries += 1
        facts = SegmentFacts(0, queries, queries, (KindFacts("flat", build_seconds, saved, 0),))
        if not there and built(facts):
            there, lost = True, lost + build_seconds
    assert lost <= 2 * min(build_seconds, queries * saved) + saved + 1e-9


SHARP = (
    KindFacts("coarse-bounds", 0.09, 0.008, 17),
    KindFacts("flat", 0.8, 0.0156, 157),
    KindFacts("coarse-clusters", 3.6, 0.0161, 15),
    KindFacts("hnsw", 45.0, 0.0162, 261),
)


@pytest.mark.parametrize(
    ("queries", "expected"),
    [
        (1, []),
        (12, ["coarse-bounds"]),
        (120, ["coarse-bounds", "flat"]),
        (10_000, ["coarse-bounds", "flat", "coarse-clusters"]),
        (1_000_000, ["coarse-bounds", "flat", "coarse-clusters", "hnsw"]),
    ],
)
def test_the_ladder_of_a_segment_of_sharp_heads(queries, expected):
    assert built(SegmentFacts(1, queries, queries, SHARP)) == expected


def test_a_segment_that_is_opened_often_gets_the_next_rung_at_once():
    seldom = SegmentFacts(2, 0, 200, SHARP)
    assert built(seldom) == []
    often = replace(seldom, opened=3)
    assert built(often) == ["coarse-bounds"]
    assert "opened 3 times, so 200 more queries are expected" in POLICY.decide(often)[0].reason


def test_the_reasons_are_said():
    kinds = (
        *SHARP[:2],
        replace(SHARP[2], state="building"),
        replace(SHARP[3], state="failed"),
        KindFacts("slow", 0.1, -0.001, 5),
        KindFacts("large", 0.1, 0.5, 999),
        KindFacts("late", 90.0, 0.5, 5),
    )
    reasons = {d.kind: d.reason for d in POLICY.decide(SegmentFacts(1, 12, 12, kinds, nbytes=100, nbytes_max=500))}
    assert reasons == {
        "coarse-bounds": "a kind that is being built, or pays sooner, saves as much",
        "flat": "a kind that is being built, or pays sooner, saves as much",
        "coarse-clusters": "it is being built",
        "hnsw": "its last build failed; it is built again when somebody asks for it",
        "slow": "it would answer no faster than what there is",
        "large": "it keeps 999 bytes beside the 100 of other indexes; all may keep 500",
        "late": "12 queries would have saved 5.81 s of the 90 s that it takes to build",
    }
