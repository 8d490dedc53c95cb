"""What a report says of how queries were answered, and how its parts add up."""

from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.base import DecodeStats
from engine_adapter.demo.audits import proven_heads, verdict
from query_optimizer.optimizer import Optimizer
from query_optimizer.rules import base_rules
from tests.engine_adapter.tiny import prompts
from tests.query_optimizer.test_golden import MIXTURES
from tests.query_optimizer.test_golden import RULES as PLANS

COUNTS, ERRORS = st.integers(0, 1 << 40), st.floats(0, 1)
WAYS = st.dictionaries(st.sampled_from(["exact", "flat dipr(0.012)", "hnsw dipr(0.012)"]), st.integers(1, 1 << 40))
STATS = st.builds(DecodeStats, *[COUNTS] * 6, *[ERRORS] * 3, WAYS)


@given(STATS, STATS, STATS)
def test_counts_add_up_and_of_errors_the_largest_stays(one, two, three):
    total = one + two + three
    assert total == one + (two + three) == three + one + two
    for name in ("tokens", "scanned", "attended", "nbytes", "nbytes_exact", "error_audits"):
        assert getattr(total, name) == sum(getattr(each, name) for each in (one, two, three))
    for name in ("error_median", "error_p95", "error_max_seen"):
        assert getattr(total, name) == max(getattr(each, name) for each in (one, two, three))
    assert sum(total.ways.values()) == sum(sum(each.ways.values()) for each in (one, two, three))


def test_a_report_counts_the_ways_of_its_own_steps(attached):
    attached.generate(prompts(2, 37), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    decode = attached.last.decode
    assert decode.ways == {"exact": 2 * attached.spec.layers * 5}
    assert (decode.error_audits, decode.error_max_seen) == (0, 0)
    attached.generate(prompts(1, 37), max_new_tokens=5, min_new_tokens=5, do_sample=False, max_missed_mass=0.5)
    assert attached.last.decode.ways == {}


def test_heads_that_are_searched_by_proof_are_proven():
    optimizer = Optimizer(base_rules(4096, "flat"))
    plans = [optimizer.plan(facts) for facts in (PLANS["error_budget"], MIXTURES["no error at all"], PLANS["hinted"])]
    assert proven_heads(plans) == [{0, 1, 2}, set(), set()]


def test_the_verdict_of_a_demo():
    read = DecodeStats(1, 1, 1, 1, 1, 14, 0.001, 0.004, 0.0125, {"exact": 30, "flat dipr(0.012)": 90})
    heads, ways, audited = verdict(read, 4, 6).splitlines()
    assert heads == "4 of 6 KV heads are proven to keep the error budget and searched; the others are read whole."
    assert ways == "Queries were answered so: flat dipr(0.012) 75%, exact 25%."
    assert audited.startswith(
        "Audited error of answers that were searched for, in the worst session: 0.10% at the median, 0.40% at"
    )
    assert audited.endswith(" p95, 1.25% at most; 14 audits.")
    assert verdict(DecodeStats(1, 1, 1, 1, 1), 0, 6).endswith("No answer that was searched for has been audited yet.")
