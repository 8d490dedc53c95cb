"""EXPLAIN of a table of facts, as files that are read in a diff.

`KVDB_REWRITE_EXPLAIN=1 pytest tests/query_optimizer/test_golden.py` writes them anew; look at the diff before it is committed.
"""

import os
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from indexes.retrieval import Dipr, Exact, TopK
from query_optimizer.access import Actual
from query_optimizer.facts import FastMemory
from query_optimizer.optimizer import Optimizer
from query_optimizer.plan import Outcome
from query_optimizer.query_options import Hints, QueryOptions
from query_optimizer.rules import base_rules
from query_optimizer.ways import Way
from tests.query_optimizer.made import CALM, WILD, budget, facts, part, proven, tail

FILES = Path(__file__).parent / "explain"
REWRITE = "KVDB_REWRITE_EXPLAIN"
FLAT, TAIL = Way("flat", Dipr()), Way("coarse-clusters", TopK(64), estimate_tail=True)
LONG = part("segment 3", 50_000, "flat")
BOTH = part("segment 3", 400_000, "flat", "hnsw")
WORLD = [part(f"segment {number}", 5000 + number, "flat") for number in range(3, 43)]
MIXED = replace(BOTH, heads=(CALM, WILD, CALM, CALM))

RULES = {
    "exact_asked": facts(LONG, tail(), options=QueryOptions(Exact())),
    "short_context": facts(part("segment 3", 3000, "flat"), tail()),
    "fresh_tail": facts(tail(6000)),
    "error_budget": facts(
        LONG, tail(), budget=budget(0.01, proven(FLAT, 0.0, bounds=(0.002, 0.004, 0.003, inf), least=(0.0, 0.0, 0.0, 0.08)))
    ),
    "hinted": facts(LONG, tail(), options=QueryOptions(hints=Hints("flat"))),
    "budget_fits": facts(part("segment 3", 50_000, "coarse-clusters"), tail(), fast=FastMemory("gpu", 1 << 30)),
    "diffuse_head": facts(replace(LONG, heads=(WILD,) * 4), tail()),
    "partial_reuse": facts(part("segment 3", 30_000, "hnsw", "flat", stored=90_000), tail()),
    "first_layers": facts(LONG, tail(), layer=0),
    "deep_layers": facts(BOTH, tail()),
    "cheapest_scan": facts(part("segment 3", 50_000, "flat", "coarse-bounds"), tail()),
    "no_index": facts(part("segment 3", 50_000), tail()),
}
MIXTURES = {
    "nothing": facts(),
    "a budget of error, nothing proven": facts(
        LONG, tail(), budget=budget(0.01, proven(FLAT, inf, audits=12, least=(-inf,) * 4), proven(TAIL, 0.07))
    ),
    "a budget of error, two ways": facts(
        part("segment 3", 50_000, "flat", "coarse-clusters"),
        tail(),
        budget=budget(0.01, proven(FLAT, 0.0, bounds=(0.002, 0.004, inf, inf)), proven(TAIL, 0.003, time_share=0.4)),
    ),
    "a budget of error, room in faster memory": facts(
        LONG, tail(), fast=FastMemory("gpu", 1 << 30), budget=budget(0.01, proven(FLAT, 0.003))
    ),
    "a budget of error, in faster memory": facts(
        part("segment 3", 50_000, "flat", tier="gpu"),
        tail(),
        fast=FastMemory("gpu", 1 << 30),
        budget=budget(0.01, proven(FLAT, 0.07, audits=181)),
    ),
    "no error at all": facts(LONG, tail(), budget=budget(0.0)),
    "a piece of a prompt": facts(LONG, part("tail", 9000, "flat", is_tail=True), new_tokens=100),
    "heads that differ": facts(MIXED, tail()),
    "heads of which most want much": facts(replace(BOTH, heads=(WILD, CALM, WILD, WILD)), tail()),
    "heads whose rest is estimated": facts(
        replace(part("segment 3", 400_000, "coarse-clusters", "hnsw"), heads=(CALM, WILD, WILD, CALM)),
        tail(),
        options=QueryOptions(estimate_tail=True),
    ),
    "heads whose rest nobody asked to estimate": facts(
        replace(part("segment 3", 400_000, "coarse-clusters", "hnsw"), heads=(CALM, WILD, WILD, CALM)), tail()
    ),
    "heads that differ, a retrieval asked for": facts(MIXED, tail(), options=QueryOptions(TopK(100))),
    "two parts": facts(part("segment 3", 50_000, "flat"), part("segment 7", 40_000, "flat", "hnsw", stored=90_000), tail()),
    "forty parts": facts(*WORLD, tail()),
    "forty parts, some without an index": facts(*[replace(p, indexes=()) if i % 3 else p for i, p in enumerate(WORLD)], tail()),
    "a budget": facts(BOTH, tail(), options=QueryOptions(hints=Hints(memory_budget=50_000_000))),
    "a budget below the hint": facts(BOTH, tail(), options=QueryOptions(hints=Hints("hnsw", memory_budget=50_000_000))),
    "a hint that is not there": facts(LONG, tail(), options=QueryOptions(hints=Hints("hnsw"))),
    "rules off": facts(BOTH, tail(), options=QueryOptions(hints=Hints(rules_off=("deep_layers", "short_context")))),
    "a graph that is being built": facts(replace(part("segment 3", 400_000, "flat"), building=("hnsw",)), tail()),
    "moved, and two tiers": facts(part("segment 3", 50_000, "flat", shift=-700), replace(tail(), tier="gpu")),
    "a bound asked for": facts(LONG, tail(), options=QueryOptions(Dipr(0.05), max_missed_mass=0.01)),
}


def planned(given):
    return Optimizer(base_rules()).plan(given)


def analyzed():
    """A plan with made-up measurements: one head of the graph gave up."""
    plan = planned(MIXTURES["heads that differ"])
    accesses = [
        replace(a, actual=Actual(a.tokens, a.tokens, a.estimate.nbytes, 3e-4))
        if a.index is None
        else replace(a, actual=Actual(181.25, 2112, 700_000, 2.5e-4, left_heads=1))
        for a in plan.accesses
    ]
    outcome = Outcome(missed=0.0012, missed_bound=0.04, missed_true=0.00093, output_error=0.0021, planning_seconds=1.1e-4)
    return replace(plan, accesses=tuple(accesses), actual=Actual(500.5, 2500, 123_456_789, 1.25e-3), outcome=outcome)


CASES = {name: str(planned(given)) for name, given in (RULES | MIXTURES).items()} | {
    "verbose": planned(MIXTURES["two parts"]).explain(verbose=True),
    "verbose, a budget of error": planned(MIXTURES["a budget of error, two ways"]).explain(verbose=True),
    "verbose, forty parts": "\n".join(planned(MIXTURES["forty parts"]).explain(verbose=True).splitlines()[-20:]),
    "analyze": str(analyzed()),
    "analyze, everything read": str(replace(analyzed(), actual=Actual(400_020, 400_020, 419_430_400, 1.6e-2))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_this(name):
    path = FILES / f"{name.replace(',', '').replace(' ', '_')}.txt"
    if os.environ.get(REWRITE):
        path.write_text(CASES[name] + "\n")
    assert path.read_text() == CASES[name] + "\n"


def test_no_file_is_left_of_a_case_that_is_gone():
    names = {f"{name.replace(',', '').replace(' ', '_')}.txt" for name in CASES}
    assert {path.name for path in FILES.iterdir()} == names


@pytest.mark.parametrize("rule", RULES)
def test_the_facts_of_a_rule_make_it_fire(rule):
    assert planned(RULES[rule]).rule == rule


def test_every_rule_has_a_case():
    assert list(RULES) == [rule.name for rule in base_rules()]


def test_many_parts_alike_are_few_lines_and_only_if_not_verbose():
    plan = planned(MIXTURES["forty parts"])
    assert len(str(plan).splitlines()) < 10
    assert plan.explain(verbose=True).count("Index Search using flat on segment") == 40


def test_continuous_integration_never_writes_them():
    root = Path(__file__).parents[2]
    given = [root / "Makefile", root / "pyproject.toml", *(root / ".github").rglob("*.yml")]
    assert not [path for path in given if REWRITE in path.read_text()]
