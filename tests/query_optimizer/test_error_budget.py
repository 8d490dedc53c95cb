"""How a layer's budget of error is spent, and which way is tried next."""

from dataclasses import replace
from math import inf, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexes.retrieval import Dipr, TopK
from query_optimizer.error_budget import AUDITS_MAX, SLOW_AUDITS, trial_of
from query_optimizer.facts import FastMemory
from query_optimizer.head_shares import TIME_SHARE_MAX, Joint, head_time, share_budget
from query_optimizer.optimizer import Optimizer
from query_optimizer.order_statistics import AUDITS_MIN
from query_optimizer.rule import piecewise_cost
from query_optimizer.rules import base_rules
from query_optimizer.ways import Way, WayFacts, candidates
from tests.query_optimizer.made import KV_HEADS, any_facts, budget, facts, part, proven

FLAT, TAIL = Way("flat", Dipr()), Way("coarse-clusters", TopK(64), estimate_tail=True)
BOUNDS = st.sampled_from([0.0, 1e-4, 1e-3, 5e-3, 0.02, 0.3, inf])
SHARES = st.sampled_from([None, 0.01, 0.1, 0.5, 0.95, 3.0])


@st.composite
def any_ways(draw):
    def way(number):
        bounds = tuple(draw(BOUNDS) for _ in range(KV_HEADS))
        given_up = tuple(draw(st.sampled_from([0.0, 0.0, 1.0])) for _ in range(KV_HEADS))
        waits = tuple(draw(st.sampled_from([False, False, True])) for _ in range(KV_HEADS))
        return proven(Way(f"kind{number}", Dipr()), 0.0, bounds=bounds, given_up=given_up, waits=waits, time_share=draw(SHARES))

    return tuple(way(number) for number in range(draw(st.integers(0, 4))))


@given(any_ways(), st.sampled_from([0.0, 1e-4, 0.01, 0.1, 1.0]))
def test_the_squares_of_the_shares_sum_to_the_budget_and_the_bounds_to_no_more(ways, error_max):
    heads = share_budget(error_max, ways, KV_HEADS)
    assert len(heads) == KV_HEADS
    assert sqrt(sum(head.bound**2 for head in heads)) <= error_max * (1 + 1e-9)
    known = {facts.way: facts for facts in ways}
    searched = [(number, head) for number, head in enumerate(heads) if head.way is not None]
    for number, head in searched:
        facts = known[head.way]
        assert head.bound == facts.bounds[number] <= head.error_max
        assert not facts.waits[number], "a way that was withdrawn is not used"
        assert head.audits == facts.audits[number]
    if searched:
        assert sum(head.error_max**2 for _, head in searched) == pytest.approx(error_max**2)
        seconds = sum(head_time(known[head.way], number) for number, head in searched) / KV_HEADS
        assert seconds + piecewise_cost(1 - len(searched) / KV_HEADS) <= TIME_SHARE_MAX


@given(any_ways())
def test_no_error_means_exact_unless_a_way_makes_none(ways):
    for number, head in enumerate(share_budget(0.0, ways, KV_HEADS)):
        assert head.way is None or next(facts for facts in ways if facts.way == head.way).bounds[number] == 0


def test_heads_that_err_in_different_queries_do_not_break_the_budget_together():
    """Each errs in one query of 16, so its 95th percentile is proven to be small; together they err in every fourth."""
    rows = np.zeros((160, KV_HEADS), np.float32)
    for head in range(KV_HEADS):
        rows[head :: 4 * KV_HEADS, head] = 0.5
    known = proven(FLAT, 0.001)
    together = share_budget(0.01, [known], KV_HEADS, [{FLAT: Joint(rows)}])
    assert all(head.way is None for head in together)
    rows[:, 1:] = 0.001
    rows[5:, 0] = 0.001
    assert all(head.way == FLAT for head in share_budget(0.01, [known], KV_HEADS, [{FLAT: Joint(rows)}]))
    rows[:, 0] = 0.5
    one = share_budget(0.01, [known], KV_HEADS, [{FLAT: Joint(rows)}])
    assert [head.way for head in one] == [None, FLAT, FLAT, FLAT]


def test_without_rows_enough_nothing_is_proven_together():
    known = proven(FLAT, 0.001)
    few, many = (Joint(np.zeros((n, KV_HEADS), np.float32)) for n in (AUDITS_MIN - 1, 99))
    for rows in ({}, {FLAT: few}, {TAIL: many}):
        assert all(head.way is None for head in share_budget(0.01, [known], KV_HEADS, [rows]))
    unknown = np.full((99, KV_HEADS), np.nan, np.float32)
    unknown[:, 0] = 0
    assert [head.way for head in share_budget(0.01, [replace(known, time_share=0.01)], KV_HEADS, [{FLAT: Joint(unknown)}])][
        1:
    ] == [None] * 3


@given(any_facts())
def test_a_query_with_an_error_budget_is_decided_by_no_rule_behind_it(known):
    rules = [rule.name for rule in base_rules()]
    behind = set(rules[rules.index("error_budget") + 1 :])
    plan = Optimizer(base_rules()).plan(known)
    searchable = {part.name for part in known.parts if part.searchable}
    if known.budget is not None:
        assert not {access.rule for access in plan.accesses if access.part in searchable} & behind


@pytest.mark.parametrize("tier", ["cpu", "gpu"])
def test_in_faster_memory_no_index_is_wished_for(tier):
    tried = replace(proven(FLAT, inf, audits=AUDITS_MAX), least=(0.5,) * KV_HEADS)
    known = facts(part("segment 3", 50_000, "flat", tier=tier), fast=FastMemory("gpu", 1 << 30), budget=budget(0.01, tried))
    assert bool(Optimizer(base_rules()).plan(known).wishes) == (tier == "cpu")


ALL = tuple(range(KV_HEADS))


def test_the_first_way_that_may_still_be_proven_is_tried():
    unknown = WayFacts.unknown(FLAT, KV_HEADS), WayFacts.unknown(TAIL, KV_HEADS)
    assert trial_of(budget(0.01, *unknown)) == (unknown[0], ALL)
    missing = replace(unknown[0], least=(0.02,) * KV_HEADS)
    assert trial_of(budget(0.01, missing, unknown[1])) == (unknown[1], ALL)
    assert trial_of(budget(0.05, missing, unknown[1])) == (missing, ALL), "a larger budget may be kept"
    waiting = replace(unknown[1], waits=(True,) * KV_HEADS)
    assert trial_of(budget(0.01, missing, waiting)) is None
    assert trial_of(budget(0.01)) is None


def test_no_slower_way_is_tried_for_heads_that_are_served():
    served = proven(FLAT, 0.0, bounds=(1e-3, 1e-3, 1e-3, inf), audits=AUDITS_MIN)
    some = replace(served, least=(0.0, 0.0, 0.0, 0.5))
    assert trial_of(budget(0.01, served)) == (served, (3,))
    assert trial_of(budget(0.01, some)) is None
    unknown = WayFacts.unknown(TAIL, KV_HEADS)
    assert trial_of(budget(0.01, some, unknown)) == (unknown, (3,))
    assert trial_of(budget(0.01, proven(FLAT, 1e-3), unknown)) is None


def test_a_faster_way_that_came_later_is_tried_for_heads_that_are_served():
    served = proven(TAIL, 1e-3, time_share=0.3)
    late = WayFacts.unknown(FLAT, KV_HEADS)
    assert trial_of(budget(0.01, late, served)) == (late, ALL)
    faster = replace(late, audits=(AUDITS_MAX - 1,) * KV_HEADS, time_share=0.2)
    assert trial_of(budget(0.01, faster, served)) == (faster, ALL)
    slower = replace(late, audits=(SLOW_AUDITS,) * KV_HEADS, time_share=0.4)
    assert trial_of(budget(0.01, slower, served)) is None
    some = replace(late, waits=(False, True, False, False), least=(-inf, -inf, 0.5, -inf))
    assert trial_of(budget(0.01, some, served)) == (some, (0, 3))


def test_heads_that_are_read_whole_come_first():
    served = proven(TAIL, 0.0, bounds=(1e-3, 1e-3, 1e-3, inf), audits=AUDITS_MAX, time_share=0.3)
    missing = WayFacts.unknown(FLAT, KV_HEADS)
    assert trial_of(budget(0.01, missing, served)) == (missing, (3,))
    missing = replace(missing, least=(-inf, -inf, -inf, 0.5))
    assert trial_of(budget(0.01, missing, served)) == (missing, (0, 1, 2))


def test_a_way_is_not_tried_for_ever():
    near = proven(FLAT, 0.011, audits=AUDITS_MAX - 1)
    assert trial_of(budget(0.01, near)) == (near, ALL)
    assert trial_of(budget(0.01, replace(near, audits=(AUDITS_MAX,) * KV_HEADS))) is None
    slow = proven(FLAT, inf, audits=SLOW_AUDITS, time_share=1.5)
    assert trial_of(budget(0.01, slow)) is None
    given_up = proven(FLAT, inf, audits=SLOW_AUDITS, given_up=(1.0,) * KV_HEADS)
    assert trial_of(budget(0.01, given_up)) is None


def test_candidates_are_in_the_order_of_the_ladder():
    ways = candidates([("coarse-clusters", True, False), ("flat", False, False), ("coarse-means", False, True)])
    assert ways[0] == FLAT
    assert TAIL in ways
    assert all(isinstance(way.retrieval, TopK) for way in ways if way.kind == "coarse-means")
    assert not [way for way in ways if way.kind == "coarse-means" and way.estimate_tail]
    assert len(set(ways)) == len(ways)
    assert all(Way.from_dict(way.to_dict()) == way for way in ways)
