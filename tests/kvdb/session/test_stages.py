"""Where the time of an attend goes: to plans, searches, what they found, and what is read whole."""

from time import perf_counter

import numpy as np
import pytest

import kvdb

TOKENS, REPEATS = 65_536, 6
SPEC = kvdb.ModelSpec("stages", layers=1, q_heads=4, kv_heads=2, head_dim=64, dtype="float32")


@pytest.fixture(scope="module")
def session():
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, TOKENS, 64), np.float32) for _ in range(2))
    with kvdb.connect() as db:
        ids = np.arange(TOKENS)
        db.import_context(SPEC, ids, [(k, v)], name="doc")
        db.build_index("doc", "flat")
        with db.create_session(SPEC, ids) as opened:
            opened.database = db._transport
            yield opened


def spent(session, **query):
    """The seconds of repeated queries by stage, and from outside."""
    q = np.random.default_rng(1).standard_normal((4, 1, 64), np.float32)
    session.attention(0, q, **query)  # plans it
    before, began = session.database.activity().seconds, perf_counter()
    for _ in range(REPEATS):
        session.attention(0, q, **query)
    whole, after = perf_counter() - began, session.database.activity().seconds
    return {stage: after[stage] - before[stage] for stage in after}, whole


FLAT = kvdb.Hints(index="flat")


def test_an_exact_query_searches_nothing(session):
    stages, _ = spent(session, retrieval=kvdb.Exact())
    assert stages["search"] == stages["gather"] == 0
    assert stages["attend"] > stages["plan"]


def least(session, stage, tokens):
    """The seconds of a stage where a search finds so many tokens, of several tries the least: others use the machine too."""
    return min(spent(session, retrieval=kvdb.TopK(tokens), hints=FLAT)[0][stage] for _ in range(3))


def test_few_tokens_of_many_take_a_search(session):
    assert least(session, "search", 8) > 3 * least(session, "gather", 8) > 0


def test_many_tokens_take_gathering(session):
    assert least(session, "gather", 512) > 3 * least(session, "gather", 8)


@pytest.mark.parametrize(
    "query", [{"retrieval": kvdb.Exact()}, {"retrieval": kvdb.TopK(512), "hints": FLAT}], ids=["exact", "flat"]
)
def test_the_stages_are_the_whole(session, query):
    shares = []
    for _ in range(5):
        stages, whole = spent(session, **query)
        assert sum(stages.values()) <= whole
        shares.append(sum(stages.values()) / whole)
    assert max(shares) > 0.8, shares
