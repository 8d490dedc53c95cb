"""What a session and a context say of audits, embedded and remote."""

import numpy as np
import pytest

import kvdb
from query_optimizer.order_statistics import AUDITS_MIN
from tests.database import database, searching_config
from tests.kvdb.session.test_audits import IDS, SPEC, WAY, Document

pytestmark = pytest.mark.usefixtures("fast_searches")

BUDGET = 0.05
QUERIES = 3 * AUDITS_MIN


@pytest.fixture
def engine():
    with database(config=searching_config(error_max=BUDGET)) as opened:
        yield opened


def test_before_any_query_nothing_is_said(engine, db):
    Document(engine)
    with db.create_session(SPEC, IDS) as session:
        stats = session.stats()
        assert (stats.error_audits, stats.error_median, stats.error_p95, stats.error_max_seen, stats.ways) == (0, 0, 0, 0, {})
    (segment,) = db.statistics("doc").segments
    assert not segment.audits.any()
    assert np.isinf(segment.error).all()


def test_what_was_audited_is_what_is_said(engine, db):
    document = Document(engine)
    with db.create_session(SPEC, IDS) as session:
        errors = [document.error(q, session.attention(0, q)) for q in (document.sharp() for _ in range(QUERIES))]
        stats = session.stats()
        assert stats.ways[str(WAY)] + stats.ways["exact"] >= QUERIES
        assert stats.ways[str(WAY)] > AUDITS_MIN
        assert 0 < stats.error_audits < QUERIES / 8
        assert 0 < stats.error_median <= stats.error_p95 <= stats.error_max_seen <= 2 * max(errors)
    (segment,) = db.statistics("doc").segments
    assert (segment.audits >= AUDITS_MIN).all()
    assert (segment.error <= BUDGET).all()
    assert (segment.error[:, 0] == segment.error[:, 1]).all(), "query heads of one KV head say the same"


def test_a_literal_retrieval_counts_for_no_way(engine, db):
    document = Document(engine)
    with db.create_session(SPEC, IDS) as session:
        session.attention(0, document.sharp(), retrieval=kvdb.Dipr())
        assert session.stats().ways == {}
        session.attention(0, document.sharp(), error_max=0)
        assert session.stats().ways == {"exact": 1}
    assert not db.statistics("doc").segments[0].audits.any()
