"""Facts go in, EXPLAIN comes out."""

import pytest

from indexes.retrieval import Exact
from query_optimizer.facts import Facts, PartFacts
from query_optimizer.optimizer import Optimizer, UnknownRule, base_rules


def plan(*parts, retrieval=None, rules_off=(), new=1):
    return Optimizer(base_rules(4096), rules_off).plan(Facts(3, parts, new, 4096, retrieval))


DOCUMENT = PartFacts("segment 7", 16_000, 20_000, "cpu")
TAIL = PartFacts("tail", 120, 120, "cpu")


def test_a_long_context_without_an_index_is_read_whole():
    assert str(plan(DOCUMENT, TAIL)) == (
        "Attention  layer 3  retrieval exact  (rule: no_index)\n"
        "└─ Merge  2 parts  16,120 tokens  63.0 MiB\n"
        "   ├─ Exact scan on segment 7  cpu  visible 16,000 of 20,000 tokens  62.5 MiB\n"
        "   └─ Exact scan on tail  cpu  120 tokens  0.5 MiB\n"
        "not taken: asked (the query names no retrieval)\n"
        "not taken: short_context (16,120 tokens are more than 4,096)\n"
        "not taken: indexed (no part has an index)"
    )


def test_a_short_context_is_read_whole_because_it_is_short():
    assert str(plan(TAIL)) == (
        "Attention  layer 3  retrieval exact  (rule: short_context)\n"
        "└─ Merge  1 part  120 tokens  0.5 MiB\n"
        "   └─ Exact scan on tail  cpu  120 tokens  0.5 MiB\n"
        "not taken: asked (the query names no retrieval)"
    )


def test_a_retrieval_that_was_asked_for_comes_first():
    asked = plan(TAIL, retrieval=Exact())
    assert asked.rule == "asked"
    assert asked.refusals == ()


def test_a_rule_that_is_switched_off_does_not_fire():
    switched = plan(TAIL, rules_off=("short_context",))
    assert switched.rule == "no_index"
    assert "not taken: short_context (switched off)" in str(switched)


@pytest.mark.parametrize("name", ["nonsense", "no_index"])
def test_a_rule_that_cannot_be_switched_off_is_named(name):
    with pytest.raises(UnknownRule, match=f"'{name}'; expected one of asked, short_context"):
        Optimizer(base_rules(4096), (name,))


def test_a_plan_holds_as_long_as_its_rule_decides_the_same():
    short = plan(TAIL)
    assert short.holds_for(4096)
    assert not short.holds_for(4097)
    assert plan(DOCUMENT).holds_for(1 << 40)


def test_a_plan_is_a_value():
    assert plan(DOCUMENT, TAIL) == plan(DOCUMENT, TAIL)
    assert plan(DOCUMENT).to_dict()["accesses"][0]["visible"] == 16_000
