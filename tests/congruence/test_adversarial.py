"""Heads that are made to be answered wrongly keep their error budget: exactly before there is a proof, and mostly after it."""

from dataclasses import replace

import numpy as np
import pytest

import benchmarks.adversarial as adversarial
import kvdb
import kvdb.indexing.background_time as background_time
import kvdb.planning.budget as budget
import kvdb.session.audits as audits
from benchmarks.adversarial import WINDOW, Asked, Oracle, Stored, decode
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
    monkeypatch.setattr(background_time, "SHARE", 1e9)
    monkeypatch.setattr(audits, "WORTH_SHARE", 0.0)
    monkeypatch.setattr(audits, "AUDIT_SHARE", 1e9)


@pytest.mark.parametrize("name", ADVERSARIES)
def test_no_answer_is_over_the_budget_before_a_proof_and_few_are_after_it(eager, name):
    stored = Stored(make(name, SIZE))
    oracle = Oracle(stored.adversary, stored.spec.softmax_scale)
    with stored.session() as session:
        found = decode(stored, session, oracle, kvdb.QueryOptions(error_max=ERROR_MAX), Asked(PROVING, CHANGED))
    stored.close()
    before, after = found.over_shares(ERROR_MAX)
    assert before == 0
    assert after <= OVER_MAX
    if found.changed is not None:
        assert (found.noticed_after(ERROR_MAX) or 0) <= NOTICED_MAX
        assert found.noticed_after(ERROR_MAX) is not None
    if name.startswith("change"):
        assert found.worst(ERROR_MAX) <= 5
    if name in {"change of queries", "change behind a sink", "sharp", "to large values", "to diffuse"}:
        assert found.proven_after is not None, "nothing was proven, so that nothing was tested"


def test_steps_of_several_sessions_meet_a_change_too(eager, monkeypatch):
    monkeypatch.setattr(adversarial, "KINDS", ("flat",))
    stored = Stored(make("change behind a sink", SIZE, seed=3))
    adversary, oracle, errors = stored.adversary, Oracle(stored.adversary, stored.spec.softmax_scale), []
    pools = {False: adversary.before, True: adversary.after}
    with stored.session() as one, stored.session() as other:
        for step in range(PROVING + CHANGED):
            late, numbers = step >= PROVING, (2 * step % SIZE.queries, (2 * step + 1) % SIZE.queries)
            q = np.stack([pools[late][:, number, None] for number in numbers])
            k, v = (np.stack([array[:, -1 - step, None]] * 2) for array in (adversary.k, adversary.v))
            oracle.append(k[0], v[0])
            out = stored.database.attend([one, other], 0, q, k, v).astype(np.float64)
            for number, asked, answer in zip(numbers, q, out, strict=True):
                right = oracle.answer(asked, number, late=late)
                errors.append(np.linalg.norm(answer - right) / np.linalg.norm(right))
        assert any(way != "exact" for way in one.stats().ways), "nothing was proven, so that nothing was tested"
    stored.close()
    over = np.array(errors) > ERROR_MAX
    assert np.convolve(over, np.ones(WINDOW, np.int64)).max() <= 5
