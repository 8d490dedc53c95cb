"""What EXPLAIN says of evidence: figures that are those of the budget, and every faster way that was passed over."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexes.retrieval import Dipr, TopK
from query_optimizer.evidence_text import evidence, known, no_proof, passed_over
from query_optimizer.ways import Way
from tests.query_optimizer.made import KV_HEADS, budget, made_budget, proven

FLAT, TAIL = Way("flat", Dipr()), Way("coarse-clusters", TopK(64), estimate_tail=True)
BUDGETS = st.composite(lambda draw: made_budget(lambda options: draw(st.sampled_from(options))))()


def every(value):
    return (value,) * KV_HEADS


@given(BUDGETS)
def test_a_head_that_is_searched_names_its_own_figures_and_the_ways_before_it(made):
    ways = [facts.way for facts in made.ways]
    for head, share in enumerate(made.heads):
        before = passed_over(made, share.way, (head,))
        if share.way is None:
            assert [refusal.rule for refusal in before] == [str(way) for way in ways]
            assert ("nearest: " in no_proof(made, (head,))) == bool(ways and made.error_max)
        else:
            assert [refusal.rule for refusal in before] == [str(way) for way in ways[: ways.index(share.way)]]
            told = f"{share.way.kind}: {share.bound:.2%} at p95 of {share.audits} audits, budget {made.error_max:.2%}"
            assert evidence(made, share.way, (head,)) == told
    assert passed_over(replace(made, trial=FLAT), FLAT, (0,)) == (), "a trial chooses nothing"


def test_several_heads_are_as_good_as_the_worst():
    made = budget(0.01, replace(proven(FLAT, 0.0, bounds=(0.002, 0.004, 0.003, inf)), audits=(180, 70, 180, 180)))
    assert evidence(made, FLAT, (0, 1, 2)) == "flat: up to 0.40% at p95 of 70 audits, budget 1.00%"


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (proven(FLAT, 0.003), "0.30% at p95 of 180 audits, in 20% of the exact time"),
        (proven(FLAT, 0.003, time_share=None), "0.30% at p95 of 180 audits"),
        (proven(FLAT, 0.003, given_up=every(0.9)), "0.30% at p95 of 180 audits, in 110% of the exact time"),
        (proven(FLAT, 0.07), "7.00% at p95 of 180 audits"),
        (proven(FLAT, inf, audits=12, least=every(-inf)), "12 of 59 audits"),
        (proven(FLAT, inf, audits=30, least=every(0.05)), "over 5.00% at p95 of 30 audits"),
        (proven(FLAT, 0.003, waits=every(True)), "withdrawn, and not tried for now"),
        (proven(FLAT, 0.0, bounds=(inf, inf, 0.02, inf), least=every(-inf)), "2.00% at p95 of 180 audits"),
    ],
    ids=str,
)
def test_what_is_known_of_a_way(facts, text):
    assert known(budget(0.01, facts), facts, tuple(range(KV_HEADS))) == text


def test_why_nothing_is_proven():
    heads = tuple(range(KV_HEADS))
    assert no_proof(budget(0.0), heads) == "no error is allowed"
    assert no_proof(budget(0.01), heads) == "there is no index whose answers could be audited, budget 1.00%"
    made = budget(0.01, proven(FLAT, inf, audits=12, least=every(-inf)), proven(TAIL, 0.07))
    assert no_proof(made, heads) == (
        "no faster way is proven to keep its share of 1.00%; nearest: coarse-clusters top_k(64) and estimate, "
        "7.00% at p95 of 180 audits"
    )
