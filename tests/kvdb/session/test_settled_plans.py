"""Sessions whose plan is settled go on without Python: into new blocks too, and until the plan ends."""

import numpy as np
import pytest

import kvdb
import kvdb.session.step as steps
from kvdb.config import Config, IndexConfig, OptimizerConfig
from tests.reference import TOLERANCE, attention, relative_error

SPEC = kvdb.ModelSpec("m", layers=1, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")


@pytest.fixture
def by_python(monkeypatch):
    """How many tokens of its own the session had whenever a step was not answered by native code alone."""
    lengths, plan = [], steps.plan

    def counted(sessions, *given):
        lengths.append(sessions[0].tails[0].length)
        return plan(sessions, *given)

    monkeypatch.setattr(steps, "plan", counted)
    return lengths


def test_a_session_that_grows_is_answered_by_native_code_until_it_is_no_short_context(by_python):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, 700, 16), np.float32) for heads in (4, 2, 2))
    config = Config(optimizer=OptimizerConfig(short_context_tokens=600))
    with kvdb.connect(config=config) as db, db.create_session(SPEC, [1]) as session:
        for at in range(700):
            out = session.attend(0, q[:, at : at + 1], k[:, at : at + 1], v[:, at : at + 1])
            if at % 97 == 0:
                want, _ = attention(q[:, at : at + 1], k[:, : at + 1], v[:, : at + 1], SPEC.softmax_scale)
                assert relative_error(out, want) <= TOLERANCE["float32"]
            if at == 300:
                assert session.stats().queries == 301
        own = session.read([0])[0]
    assert [at for at in by_python if 20 < at < 600] == []
    assert by_python[-1] >= 600
    np.testing.assert_array_equal(own[0], k)


def test_where_there_is_no_index_nothing_is_looked_at_until_there_is_one(by_python):
    config = Config(
        optimizer=OptimizerConfig(short_context_tokens=64),
        indexes=IndexConfig(on_demand="", automatic=False, segment_tokens_min=64),
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, 1400, 16), np.float32) for heads in (4, 2, 2))
    tokens = np.arange(1000)
    with kvdb.connect(config=config) as db:
        db.import_context(SPEC, tokens, [(k[:, :1000], v[:, :1000])], name="doc")
        with db.create_session(SPEC, tokens) as session:

            def step(at):
                return session.attend(0, q[:, at : at + 1], k[:, at : at + 1], v[:, at : at + 1])

            for at in range(1000, 1200):
                step(at)
            assert len(by_python) <= 4  # the first, and where the plan is used up after 32 queries, then twice as many
            db.build_index("doc", "flat")
            before = len(by_python)
            want, _ = attention(q[:, 1200:1201], k[:, :1201], v[:, :1201], SPEC.softmax_scale)
            assert relative_error(step(1200), want) <= 0.02
            assert len(by_python) == before + 1
            for at in range(1201, 1400):
                step(at)
            assert session.stats().queries == 400
            assert len(by_python) - before > 5, "ways are tried, and audited"
