"""The last queries of a layer, which are compared all at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdb
import kvdb.indexing.background_time as background_time
import kvdb.session.audits as audits
from kvdb.session.recent_queries import RecentQueries
from query_optimizer.query_options import QueryOptions
from tests.database import database, searching_config

SPEC = kvdb.ModelSpec("recent", layers=1, q_heads=4, kv_heads=2, head_dim=32, dtype="float32")
TOKENS = 4096
BUDGET = QueryOptions(error_max=0.05)


def queries(positions):
    """A query for each position, by whose number it is told."""
    return np.broadcast_to(np.float32(list(positions))[None, :, None], (2, len(positions), 3)).copy()


def positions_of(kept):
    return [] if kept is None else kept[0][0, :, 0].astype(int).tolist()


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["on", "again", "elsewhere"]), st.integers(1, 5)), max_size=12))
def test_the_last_of_tokens_in_a_row_are_kept(most, calls):
    recent, end, expected = RecentQueries(most), 100, []
    for where, n in calls:
        if where == "again":
            end -= min(n, len(expected))
            expected = expected[: len(expected) - min(n, len(expected))]
        elif where == "elsewhere":
            end, expected = end + 50, []
        positions = list(range(end, end + n))
        end += n
        recent.add(queries(positions), -queries(positions), (), end)
        expected = (expected + positions)[-most:]
        kept = recent.read_whole((), end, most)
        assert positions_of(kept) == expected
        assert (kept[1] == -kept[0]).all()
        assert recent.ends_at(end)
        assert not recent.ends_at(end + 1)
        assert positions_of(recent.read_whole((), end, 2)) == expected[-2:]
    recent.forget()
    assert recent.read_whole((), end, most) is None
    assert len(recent) == 0


def test_heads_that_were_searched_for_some_are_not_read_whole():
    recent = RecentQueries(8)
    recent.add(queries([1]), queries([1]), (0,), 2)
    recent.add(queries([2]), queries([2]), (), 3)
    assert recent.read_whole((0,), 3, 8) is None
    assert positions_of(recent.read_whole((1,), 3, 8)) == [1, 2]


@pytest.fixture
def compared(monkeypatch):
    """Every comparison: its queries, and the exact answers to them."""
    monkeypatch.setattr(background_time, "SHARE", 1e9)
    monkeypatch.setattr(audits, "WORTH_SHARE", 0.0)
    monkeypatch.setattr(audits, "time_share", lambda shadow_ns, exact_ns: 0.2)
    seen, compare = [], audits.Audits._compare

    def noted(self, comparison, q, exact, *rest):
        seen.append((q.copy(), exact.copy()))
        return compare(self, comparison, q, exact, *rest)

    monkeypatch.setattr(audits.Audits, "_compare", noted)
    return seen


@pytest.fixture
def session():
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, TOKENS, 32)).astype(np.float32) for _ in range(2))
    with database(config=searching_config()) as engine:
        writing = engine.begin_import(SPEC, np.arange(TOKENS), "doc")
        writing.write(0, k, v)
        writing.commit()
        engine.build_index("doc", "flat")
        session = engine.create_session(SPEC, np.arange(TOKENS))
        yield session
        session.close()


def step(session, rng, asked):
    q, (k, v) = rng.standard_normal((4, 1, 32)).astype(np.float32), rng.standard_normal((2, 2, 1, 32)).astype(np.float32)
    asked.append((q, session.attend(0, q, k, v, BUDGET)))


def test_steps_are_compared_in_batches_with_the_answers_that_were_given(session, compared):
    rng, asked = np.random.default_rng(1), []
    for _ in range(5 * audits.RECENT_QUERIES):
        step(session, rng, asked)
    session.stats()
    assert compared, "some were"
    at = {q.tobytes(): number for number, (q, _) in enumerate(asked)}
    for q, exact in compared:
        assert q.shape[1] == audits.RECENT_QUERIES
        numbers = [at[q[:, [i]].tobytes()] for i in range(q.shape[1])]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "they are of tokens in a row"
        for i, number in enumerate(numbers):
            assert (exact[:, [i]] == asked[number][1]).all()


def test_what_is_taken_back_is_not_compared(session, compared):
    rng, asked = np.random.default_rng(2), []
    for _ in range(10):
        step(session, rng, asked)
    session.truncate(TOKENS + 6)
    gone = {q.tobytes() for q, _ in asked}
    for _ in range(3 * audits.RECENT_QUERIES):
        step(session, rng, asked)
    session.stats()
    assert compared
    assert not any(q[:, [i]].tobytes() in gone for q, _ in compared for i in range(q.shape[1]))


def test_callers_that_only_ask_are_compared_one_by_one(session, compared):
    rng = np.random.default_rng(3)
    for _ in range(20):
        session.attention(0, rng.standard_normal((4, 1, 32)).astype(np.float32), BUDGET)
    session.stats()
    assert len(compared) >= 10
    assert {q.shape[1] for q, _ in compared} == {1}
