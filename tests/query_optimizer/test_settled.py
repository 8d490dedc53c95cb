"""Plans that nothing changes which may still be learned: they are kept."""

from random import Random

import pytest

from indexes.retrieval import Exact
from query_optimizer.optimizer import Optimizer
from query_optimizer.query_options import QueryOptions
from query_optimizer.rules import Fired, base_rules
from tests.query_optimizer.made import CALM, WILD, facts, made_facts, part, tail

SHORT = 4096
OPTIMIZER = Optimizer(base_rules(SHORT))


def test_a_settled_plan_is_that_of_whatever_else_is_known():
    rng = Random(0)
    made = [made_facts(rng.choice) for _ in range(3000)]
    settled = [(one, plan) for one in made if (plan := OPTIMIZER.plan(one)).settled]
    others = [one for one in made if one.fast is None]
    tried = 0
    for one, plan in settled:
        for other in rng.sample(others, 20):
            alike = facts(*other.parts, layer=other.layer, options=one.options)
            if alike.parts and alike.tokens < plan.tokens_end:
                found = OPTIMIZER.plan(alike)
                assert (found.rule, found.retrieval, found.searches) == (plan.rule, plan.retrieval, False)
                tried += 1
    assert tried > 500


@pytest.mark.parametrize("heads", [(), (CALM,) * 4, (WILD,) * 4])
def test_until_when(heads):
    short = OPTIMIZER.plan(facts(part("doc", 400, "flat", heads=heads), tail()))
    assert (short.settled, short.tokens_end) == (True, SHORT + 1)
    long = OPTIMIZER.plan(facts(part("doc", 50_000, "flat", heads=heads), tail()))
    assert (long.settled, long.tokens_end) == (False, int(50_020 * 1.25))
    exact = OPTIMIZER.plan(facts(part("doc", 50_000, "flat", heads=heads), options=QueryOptions(Exact())))
    assert exact.settled
    assert exact.holds_for(1 << 40)


class Longer:
    """A rule of a caller's, for more than 500 tokens."""

    name, before = "longer", "exact_asked"

    def when(self, facts, _part, _heads):
        return Fired(reason="longer") if facts.tokens > 500 else "shorter"


def test_rules_of_callers_are_asked_again():
    with_rule = Optimizer((Longer(), *base_rules(SHORT)), by_name=True)
    plan = with_rule.plan(facts(part("doc", 400)))
    assert (plan.rule, plan.settled, plan.tokens_end) == ("short_context", False, 500)


def test_what_a_gpu_holds_is_looked_at_again():
    rng = Random(1)
    on_gpu = [one for one in (made_facts(rng.choice) for _ in range(500)) if one.fast is not None]
    assert on_gpu
    assert not any(OPTIMIZER.plan(one).settled for one in on_gpu)
