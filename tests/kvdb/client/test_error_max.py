"""How far an answer may be from exact attention: the call says it, else its session, else the configuration."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdb
from kvdb.config import ERROR_MAX, Config, OptimizerConfig
from kvdb.errors import ConfigError, InvalidArgument
from tests.database import database

Q, K = np.ones((4, 1, 16), np.float32), np.ones((2, 1, 16), np.float32)
ERRORS = st.none() | st.floats(0, 1)


@pytest.fixture
def engine(witness):
    """A database that asks the witness first."""
    with database([witness]) as opened:
        yield opened


def seen(witness):
    """The error_max of each query since the last time."""
    given_to_rules, witness.seen = [asked.error_max for asked in witness.seen], []
    return given_to_rules


@given(own=ERRORS, named=ERRORS)
def test_the_nearest_says_it(db, spec, witness, own, named):
    expected = next(value for value in (named, own, ERROR_MAX) if value is not None)
    with db.create_session(spec, [1, 2], error_max=own) as session, session.fork() as twin:
        assert session.error_max == twin.error_max == (ERROR_MAX if own is None else own)
        for opened in (session, twin):
            for call in (
                lambda s, **asked: s.attend(0, Q, K, K, **asked),
                lambda s, **asked: s.attention(0, Q, **asked),
                lambda s, **asked: s.explain(1, **asked),
                lambda s, **asked: db.attend([s], 1, Q[None], K[None], K[None], **asked),
                lambda s, **asked: db.attention([s], 1, Q[None], **asked),
            ):
                call(opened, error_max=named)
                call(opened, options=kvdb.QueryOptions(error_max=named, hints=kvdb.Hints(rules_off=("short_context",))))
    assert set(seen(witness)) == {expected}


@given(own=ERRORS)
def test_a_session_of_parts_and_one_of_a_context_have_their_own(db, spec, witness, own):
    context = db.import_context(spec, [1, 2], [(np.ones((2, 2, 16), np.float32),) * 2] * 2, name="doc")
    with (
        context,
        context.create_session([1, 2], error_max=own) as first,
        db.create_session(spec, parts=["doc"], error_max=own) as second,
    ):
        for session in (first, second):
            session.attend(0, Q, K, K)
    db.drop("doc")
    assert set(seen(witness)) == {ERROR_MAX if own is None else own}


@pytest.mark.parametrize("asked", [{"retrieval": kvdb.TopK(2)}, {"max_missed_mass": 0.5}, {"estimate_tail": True}], ids=str)
def test_what_names_something_else_has_none(db, spec, witness, asked):
    with db.create_session(spec, [1, 2], error_max=0.5) as session:
        session.attend(0, Q, K, K, **asked)
        db.attend([session], 1, Q[None], K[None], K[None], **asked)
    assert seen(witness) == [None, None]


def test_sessions_together_keep_each_its_own(db, spec, witness):
    own = [0.5, None, 0.25]
    sessions = [db.create_session(spec, [1, 2], error_max=value) for value in own]
    q, k = np.stack([Q] * 3), np.stack([K] * 3)
    db.attend(sessions, 0, q, k, k)
    assert seen(witness) == [0.5, ERROR_MAX, 0.25]
    db.attend(sessions, 1, q, k, k, error_max=0.125)
    assert seen(witness) == [0.125] * 3
    for session in sessions:
        session.close()


def test_none_at_all_is_exact(db, spec):
    with db.create_session(spec, [1, 2], error_max=0) as session:
        session.attend(0, Q, K, K)
        assert session.explain(0).retrieval == kvdb.Exact()
        assert session.explain(0, retrieval=kvdb.TopK(2)).retrieval == kvdb.TopK(2)
        with pytest.raises(InvalidArgument, match=r"'flat', but with an error_max of 0 attention is exact.*expected index=None"):
            session.attention(0, Q, error_max=0, hints=kvdb.Hints("flat"))


@pytest.mark.parametrize("wrong", [-0.01, 1.01, float("nan"), "0.1", True, [0.1]])
def test_sessions_that_cannot_be(db, spec, wrong):
    for call in (
        lambda: db.create_session(spec, [1], error_max=wrong),
        lambda: db.create_session(spec, parts=[[1]], error_max=wrong),
    ):
        with pytest.raises(InvalidArgument, match="error_max is .*from 0, which is exact, to 1"):
            call()


@given(st.floats(0, 1))
def test_the_configuration_has_the_default(spec, error_max):
    config = Config(optimizer=OptimizerConfig(error_max=error_max))
    with kvdb.connect(config=config) as db, db.create_session(spec, [1]) as session:
        assert session.error_max == error_max


@pytest.mark.parametrize("wrong", [-0.01, 1.01, float("nan"), float("inf"), "0.1", None, True])
def test_configurations_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match="optimizer.error_max is"):
        OptimizerConfig(error_max=wrong)
