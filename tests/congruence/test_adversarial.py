"""Heads that are made to be answered wrongly keep their error budget: exactly before there is a proof, and mostly after it."""

from dataclasses import replace

import pytest

import kvdb
import kvdb.planning.budget as budget
import kvdb.session.audits as audits
from benchmarks.adversarial import Oracle, Stored, decode
from benchmarks.adversaries import ADVERSARIES, Size, make

SIZE = Size(tokens=8192, kv_heads=2, group=2, head_dim=64, queries=64)
ERROR_MAX = 0.02
PROVING, CHANGED = 130, 100
NOTICED_MAX = 64
OVER_MAX = 0.05


@pytest.fixture
def eager(monkeypatch):
    """Ways are taken for faster than they are over so few tokens, and audits for free."""
    way_facts = budget._way_facts
    monkeypatch.setattr(budget, "_way_facts", lambda *of: replace(way_facts(*of), time_share=0.1))
    monkeypatch.setattr(audits, "SHADOW_SHARE", 1e9)
    monkeypatch.setattr(audits, "AUDIT_SHARE", 1e9)


@pytest.mark.parametrize("name", ADVERSARIES)
def test_no_answer_is_over_the_budget_before_a_proof_and_few_are_after_it(eager, name):
    stored = Stored(make(name, SIZE))
    oracle = Oracle(stored.adversary, stored.spec.softmax_scale)
    with stored.session() as session:
        found = decode(stored, session, oracle, kvdb.QueryOptions(error_max=ERROR_MAX), PROVING, CHANGED)
    stored.close()
    before, after = found.over_shares(ERROR_MAX)
    assert before == 0
    assert after <= OVER_MAX
    if found.changed is not None:
        assert (found.noticed_after(ERROR_MAX) or 0) <= NOTICED_MAX
        assert found.noticed_after(ERROR_MAX) is not None
    if name in {"sharp", "to large values", "to diffuse"}:
        assert found.proven_after is not None, "nothing was proven, so that nothing was tested"
