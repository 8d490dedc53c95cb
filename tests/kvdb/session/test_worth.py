"""What is not worth a proof is not begun, and EXPLAIN says so."""

from contextlib import closing

import numpy as np
import pytest

import kvdb
import kvdb.indexing.background_time as background_time
import kvdb.session.audits as audits
from kvdb.errors import InvalidArgument
from tests.database import database
from tests.kvdb.session.test_audits import BUDGET, IDS, SPEC, Document


@pytest.fixture
def engine(monkeypatch):
    """Attention takes all of a step, and there is all the time for proofs."""
    monkeypatch.setattr(background_time, "SHARE", 1e9)
    monkeypatch.setattr(audits, "WORTH_SHARE", 0.0)
    config = kvdb.Config(
        optimizer=kvdb.config.OptimizerConfig(rules_off=("short_context",), machine_file=""),
        indexes=kvdb.config.IndexConfig(on_demand="flat", automatic=True, segment_tokens_min=256),
    )
    with database(config=config) as opened:
        yield opened


def ask(engine, queries, expected_tokens=None):
    """Steps of a session; what EXPLAIN notes at its end, and the indexes there are then."""
    ones = np.ones((2, 1, SPEC.head_dim), np.float32)
    with closing(engine.create_session(SPEC, IDS, expected_tokens=expected_tokens)) as session:
        for q in queries:
            session.attend(0, q, ones, ones, BUDGET)
        notes = session.explain(0, BUDGET).notes
    engine.wait_for_builds()
    return notes, {info.kind for info in engine.indexes("doc")}


def test_a_session_that_asks_little_begins_nothing(engine):
    document = Document(engine, kinds=())
    notes, kinds = ask(engine, [document.sharp() for _ in range(10)], expected_tokens=20)
    assert kinds == set()
    assert any("would pay after" in note and "are expected" in note for note in notes)


def test_a_session_that_asks_much_has_its_indexes_built(engine):
    document = Document(engine, kinds=())
    notes, kinds = ask(engine, [document.sharp() for _ in range(10)], expected_tokens=100_000)
    assert kinds == {"flat"}
    assert not any("no way is tried" in note for note in notes)


def test_what_was_asked_before_is_expected_again(engine, monkeypatch):
    document = Document(engine, kinds=())
    monkeypatch.setattr("kvdb.planning.planner.Planner.asked_before", lambda _: 1e6)
    assert ask(engine, [document.sharp() for _ in range(10)], expected_tokens=20)[1] == {"flat"}


def test_attention_that_is_a_small_part_of_a_step_begins_nothing(engine, monkeypatch):
    document = Document(engine, kinds=())
    monkeypatch.setattr(audits, "WORTH_SHARE", 1e9)
    notes, kinds = ask(engine, [document.sharp() for _ in range(10)], expected_tokens=100_000)
    assert kinds == set()
    assert any("of a step" in note for note in notes)


def test_a_search_that_was_asked_for_has_its_index_in_any_case(engine):
    document = Document(engine, kinds=())
    with closing(engine.create_session(SPEC, IDS, expected_tokens=0)) as session:
        session.attention(0, document.sharp(), kvdb.QueryOptions(kvdb.Dipr(0.1)))
    engine.wait_for_builds()
    assert {info.kind for info in engine.indexes("doc")} == {"flat"}


@pytest.mark.parametrize("wrong", [-1, 1.5, "many", 1 << 64])
def test_what_is_no_number_of_tokens_is_refused(engine, wrong):
    with pytest.raises(InvalidArgument, match="expected_tokens"):
        engine.create_session(SPEC, IDS, expected_tokens=wrong)
