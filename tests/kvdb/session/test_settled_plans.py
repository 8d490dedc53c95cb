"""Sessions whose plan is settled go on without Python: into new blocks too, and until the plan ends."""

import numpy as np

import kvdb
from kvdb.config import Config, OptimizerConfig
from kvdb.session.state import SessionState
from tests.reference import TOLERANCE, attention, relative_error

SPEC = kvdb.ModelSpec("m", layers=1, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")


def test_a_session_that_grows_is_answered_by_native_code_until_it_is_no_short_context(monkeypatch):
    by_python, attend = [], SessionState._attend

    def counted(self, *given):
        by_python.append(self.tails[0].length)
        return attend(self, *given)

    monkeypatch.setattr(SessionState, "_attend", counted)
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
