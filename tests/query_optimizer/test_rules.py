"""Properties of every plan, over facts that hypothesis makes up."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexes.retrieval import Dipr, Exact, TopK
from query_optimizer.access import WINDOW
from query_optimizer.error_budget import ErrorBudget
from query_optimizer.optimizer import Optimizer, UnknownRule
from query_optimizer.plan import Plan
from query_optimizer.query_options import Hints, QueryOptions
from query_optimizer.rules import Fired, base_rules
from tests.query_optimizer.made import KINDS, KV_HEADS, any_facts, made_facts

RULES = base_rules()
NAMES = [rule.name for rule in RULES]
OPTIONAL = NAMES[:-1]
RULES_OFF = st.lists(st.sampled_from(OPTIONAL), unique=True).map(tuple)
FACTS = any_facts()
EXAMPLES = 2000

INDEPENDENT = {
    ("exact_asked", "short_context"): "both read everything; the first names the reason that no length changes",
    ("short_context", "fresh_tail"): "both read everything",
    ("partial_reuse", "first_layers"): "both take the cheapest scan",
}
"""Adjacent rules that may be swapped, and why; of all others the order is relied on."""


@cache
def examples():
    """Facts, the same in every run."""
    rng = Random(0)
    return [made_facts(rng.choice) for _ in range(EXAMPLES)]


def ways(plan):
    """The accesses of a plan without the names of rules."""
    return [(a.part, a.begin, a.end, a.index, a.retrieval, a.heads, a.estimate_tail, a.kept_in) for a in plan.accesses]


def fired(rules):
    """The rules that are behind an access in some plan."""
    optimizer = Optimizer(rules)
    return {access.rule for facts in examples() for access in optimizer.plan(facts).accesses}


def swapped(first):
    """The rules with `first` and the one behind it exchanged."""
    at = NAMES.index(first)
    return [*RULES[:at], RULES[at + 1], RULES[at], *RULES[at + 2 :]]


def differ(rules, others):
    one, other = Optimizer(rules), _AnyLast(others)
    return any(ways(one.plan(facts)) != ways(other.plan(facts)) for facts in examples())


class _AnyLast(Optimizer):
    """Takes rules behind one that always fires."""


@dataclass(frozen=True)
class Never:
    name: str = "never"

    def when(self, facts, part, heads):
        return Fired() if not facts.layers else "there are layers"


def test_every_rule_can_fire():
    assert fired(RULES) == {*NAMES, WINDOW}


def test_a_rule_that_cannot_fire_would_be_found():
    assert fired((Never(), *RULES)) == {*NAMES, WINDOW}
    assert fired((*RULES, replace(RULES[-1], name="behind the last"))) == {*NAMES, WINDOW}


@pytest.mark.parametrize("pair", list(pairwise(NAMES)), ids=str)
def test_the_order_of_two_rules_matters_or_they_say_why_it_does_not(pair):
    assert differ(RULES, swapped(pair[0])) == (pair not in INDEPENDENT)


def check_covers(facts, plan):
    """Every visible token of every KV head is in exactly one access."""
    seen = {part.name: np.zeros((KV_HEADS, part.visible), int) for part in facts.parts}
    for access in plan.accesses:
        assert 0 <= access.begin < access.end <= access.visible
        assert list(access.heads) == sorted(set(access.heads))
        seen[access.part][list(access.heads), access.begin : access.end] += 1
    assert all((counts == 1).all() for counts in seen.values())


def check_abides(facts, plan):
    """No index that is not there, is over the budget or covers other tokens; a retrieval asked for is kept."""
    parts = {part.name: part for part in facts.parts}
    for access in plan.accesses:
        part = parts[access.part]
        if access.index is None:
            assert access.retrieval == Exact()
            assert not access.estimate_tail
            continue
        assert facts.retrieval != Exact()
        assert access.index in [index.kind for index in facts.affordable(part)]
        assert (access.begin, access.end) == (part.begin, part.end)
        budget = facts.hints.memory_budget
        if budget is not None:
            (kept_nbytes,) = (index.kept_nbytes for index in part.indexes if index.kind == access.index)
            assert kept_nbytes + facts.window_tokens * facts.token_nbytes <= budget
        if facts.retrieval is not None:
            assert access.retrieval == facts.retrieval
        if access.estimate_tail:
            assert facts.estimate_tail or facts.budget, "nothing is estimated unless the caller says so, or it is proven"
        if facts.budget is not None and access.rule == "error_budget":
            ways = {facts.budget.heads[head].way for head in access.heads}
            assert ways == {access.way}, "a head is answered by what is proven for it"
    assert plan.retrieval_given == (facts.retrieval is not None)
    assert facts.retrieval in {None, plan.retrieval}


@given(FACTS, RULES_OFF, RULES_OFF)
def test_a_plan_covers_everything_and_abides_by_what_was_asked(facts, off, off_by_hint):
    hints = replace(facts.hints, rules_off=off_by_hint)
    facts = replace(facts, options=replace(facts.options, hints=hints))
    plan = Optimizer(RULES, off).plan(facts)
    if "exact_asked" not in {*off, *off_by_hint}:
        check_abides(facts, plan)
    check_covers(facts, plan)
    assert not {access.rule for access in plan.accesses} & {*off, *off_by_hint}
    assert plan.estimate.seconds >= sum(access.estimate.seconds for access in plan.accesses) >= 0
    assert plan.estimate.nbytes == sum(access.estimate.nbytes for access in plan.accesses)
    assert plan.estimate.tokens == facts.tokens
    assert plan.holds_for(facts.tokens)
    assert all(kind in {*KINDS, *ErrorBudget().wishes} for _, kind in plan.wishes)


@given(FACTS)
def test_planning_is_deterministic_and_a_plan_survives_the_wire(facts):
    optimizer = Optimizer(RULES)
    plan = optimizer.plan(facts)
    assert Optimizer(base_rules()).plan(facts) == plan == optimizer.plan(facts)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert str(Plan.from_dict(plan.to_dict())) == str(plan)


@given(FACTS, st.booleans())
def test_explain_names_every_way_and_only_rules_that_are_there(facts, verbose):
    plan = Optimizer(RULES).plan(facts)
    text = plan.explain(verbose)
    for access in plan.accesses:
        assert (f"Index Search using {access.index} on" if access.index else "Exact Scan on") in text
        assert access.rule == WINDOW or f"Rule: {access.rule}" in text
    assert all(line.strip().split()[1] in NAMES for line in text.splitlines() if line.strip().startswith("Rule: "))
    assert text.isprintable() or "\n" in text


@given(FACTS)
def test_a_hint_is_followed_wherever_it_can_be(facts):
    bound = facts.options.max_missed_mass
    facts = replace(facts, options=QueryOptions(Dipr(), bound, hints=Hints("flat", ("exact_asked",))), new_tokens=1, budget=None)
    for access in Optimizer(RULES).plan(facts).accesses:
        part = next(part for part in facts.parts if part.name == access.part)
        there = "flat" in [index.kind for index in part.indexes] and access.rule != WINDOW
        assert not there or access.index == "flat"


@pytest.mark.parametrize("names", [("nothing",), ("no_index",), ("Hinted",), ("hinted", "")], ids=str)
def test_rules_that_cannot_be_switched_off(names):
    facts = replace(examples()[0], options=QueryOptions(hints=Hints(rules_off=names)))
    for call in (lambda: Optimizer(RULES, names), lambda: Optimizer(RULES).plan(facts)):
        with pytest.raises(UnknownRule, match="expected one of exact_asked, short_context"):
            call()


@pytest.mark.parametrize(
    "change", [{"accesses": 3}, {"nothing": 1}, {"wishes": [1]}, {"outcome": {"x": 1}}, {"retrieval": TopK(1)}]
)
def test_values_that_are_no_plan_are_refused(change):
    values = Optimizer(RULES).plan(examples()[0]).to_dict()
    with pytest.raises(ValueError, match=r"expected what Plan.to_dict returns"):
        Plan.from_dict({**values, **change})
