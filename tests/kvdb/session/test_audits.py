"""The error budget at work: nothing approximate before it is proven, audits afterwards, and an end to what stops being true."""

from contextlib import closing

import numpy as np
import pytest

import kvdb
import kvdb.indexing.background_time as background_time
import kvdb.session.audits as audits
from indexes.retrieval import Dipr
from query_optimizer.order_statistics import AUDITS_MIN
from query_optimizer.query_options import QueryOptions
from query_optimizer.ways import Way
from tests.database import database, searching_config
from tests.reference import attention

pytestmark = pytest.mark.usefixtures("fast_searches")

TOKENS, DIM = 4096, 32
SPEC = kvdb.ModelSpec("audited", layers=1, q_heads=4, kv_heads=2, head_dim=DIM, dtype="float32")
IDS = np.arange(TOKENS, dtype=np.int32)
WAY = Way("flat", Dipr(0.012))
BUDGET = QueryOptions(error_max=0.05)
PATTERNS = 8


@pytest.fixture
def engine():
    with database(config=searching_config()) as opened:
        yield opened


class Document:
    """Keys of which a few carry one of some patterns. A sharp query looks for one of them, a flat one for nothing."""

    def __init__(self, engine, kinds=("flat",), name="doc"):
        self.rng = np.random.default_rng(3)
        self.k = self.rng.standard_normal((2, TOKENS, DIM)).astype(np.float32)
        self.v = self.rng.standard_normal((2, TOKENS, DIM)).astype(np.float32)
        self.k[..., :PATTERNS] = 0
        for pattern in range(PATTERNS):
            self.k[:, self.rng.choice(TOKENS, 12, replace=False), pattern] = 1
        writing = engine.begin_import(SPEC, IDS, name)
        writing.write(0, self.k, self.v)
        writing.commit()
        for kind in kinds:
            engine.build_index(name, kind)

    def sharp(self, heads=slice(None)):
        q = 0.05 * self.rng.standard_normal((4, 1, DIM)).astype(np.float32)
        q[heads, 0, self.rng.integers(PATTERNS)] = 22 / SPEC.softmax_scale
        return q

    def flat(self):
        return 0.05 * self.rng.standard_normal((4, 1, DIM)).astype(np.float32)

    def error(self, q, out):
        right = attention(q, self.k, self.v, SPEC.softmax_scale)[0].astype(np.float64)
        return float(np.linalg.norm(out - right) / np.linalg.norm(right))


def decode(document, session, queries, options=BUDGET):
    """The errors of the answers, and whether each was searched for."""
    errors, searched = [], []
    for q in queries:
        before = session.stats().tokens_retrieved
        errors.append(document.error(q, session.attention(0, q, options)))
        searched.append(session.stats().tokens_retrieved - before < 0.9 * TOKENS)
    return np.array(errors), np.array(searched)


def opened(engine):
    """A session over the document, closed at the end."""
    return closing(engine.create_session(SPEC, IDS))


def test_nothing_is_searched_before_it_is_proven_and_almost_everything_after(engine):
    document = Document(engine)
    with opened(engine) as session:
        errors, searched = decode(document, session, [document.sharp() for _ in range(400)])
        first = int(searched.argmax())
        assert first >= AUDITS_MIN
        assert (errors[:first] < 1e-5).all()
        assert searched[first:].mean() > 0.8
        assert (errors[first:] > 0.05).mean() <= 0.05
        plan = session.explain(0, BUDGET)
        assert plan.rule == "error_budget"
        assert "audits, budget 5.00%" in str(plan)


def test_a_proof_belongs_to_the_segment(engine):
    document = Document(engine)
    with opened(engine) as session:
        decode(document, session, [document.sharp() for _ in range(300)])
    with opened(engine) as other:
        _, searched = decode(document, other, [document.sharp() for _ in range(10)])
        assert searched[1:].all(), "the first may be audited"


def test_heads_are_proven_one_by_one(engine):
    """The queries of the second KV head want everything, so it is read whole."""
    document = Document(engine)
    with opened(engine) as session:
        errors, searched = decode(document, session, [document.sharp(heads=slice(0, 2)) for _ in range(400)])
        assert searched[-50:].mean() > 0.8
        assert (errors > 0.05).mean() <= 0.05
        by_index = {access.index: access.heads for access in session.explain(0, BUDGET).accesses if access.rule == "error_budget"}
        assert by_index == {"flat": (0,), None: (1,)}


def test_a_faster_index_that_comes_later_is_tried_for_heads_that_are_served(engine, monkeypatch):
    document = Document(engine, kinds=("quantized",))
    with opened(engine) as session:
        decode(document, session, [document.sharp() for _ in range(AUDITS_MIN + 20)])
        assert set(session.stats().ways) > {"exact"}
        assert str(WAY) not in session.stats().ways
        engine.build_index("doc", "flat")
        monkeypatch.setattr(background_time, "SHARE", 0.0)
        exact = session.stats().ways["exact"]
        decode(document, session, [document.sharp() for _ in range(20)])
        assert session.stats().ways["exact"] <= exact + 2, "nothing is read whole where there is no time for it"
        monkeypatch.setattr(background_time, "SHARE", 1e9)
        errors, _ = decode(document, session, [document.sharp() for _ in range(AUDITS_MIN + 20)])
        assert session.stats().ways[str(WAY)] > 0
        assert (errors <= BUDGET.error_max).all()


def test_heads_that_change_their_habits_are_noticed(engine):
    document = Document(engine)
    with opened(engine) as session:
        decode(document, session, [document.sharp() for _ in range(300)])
        errors, _ = decode(document, session, [document.flat() for _ in range(64)])
        assert (errors > 0.05).mean() <= 0.05, "what is estimated to miss more than any audit did is read whole"


def test_values_that_begin_to_matter_are_noticed_by_audits(engine, monkeypatch):
    """What is left out has as little mass as ever, but values a thousand times as large: no estimate of the mass shows it."""
    document = Document(engine)
    with opened(engine) as session:
        decode(document, session, [document.sharp() for _ in range(300)])
        assert session.explain(0, BUDGET).searches
        shadow = audits.head_errors
        monkeypatch.setattr(audits, "AUDIT_SHARE", 1e9)  # an answer that other work delayed would use the time of many audits
        monkeypatch.setattr(audits, "head_errors", lambda *given: shadow(*given) + 1)
        for _ in range(3 * audits.AUDIT_QUERIES):
            session.attention(0, document.sharp(), BUDGET)
        assert not session.explain(0, BUDGET).searches


@pytest.mark.parametrize("error_max", [0.0, 1e-9])
def test_no_error_means_exact(engine, error_max):
    document = Document(engine)
    with opened(engine) as session:
        errors, searched = decode(document, session, [document.sharp() for _ in range(150)], QueryOptions(error_max=error_max))
        assert not searched.any()
        assert (errors < 1e-5).all()


def test_a_retrieval_that_is_named_stays_literal_and_proves_nothing(engine):
    document = Document(engine)
    with opened(engine) as session:
        for _ in range(100):
            session.attention(0, document.sharp(), QueryOptions(Dipr(0.012)))
        assert not session.explain(0, BUDGET).searches


def test_sessions_that_step_together_are_audited_too(engine):
    document = Document(engine)
    with opened(engine) as one, opened(engine) as other:
        k, v = document.k[:, :1], document.v[:, :1]
        for _ in range(120):
            q = np.stack([document.sharp(), document.sharp()])
            engine.attend([one, other], 0, q, np.stack([k, k]), np.stack([v, v]), BUDGET)
        assert one.explain(0, BUDGET).searches


def test_closing_waits_for_an_audit_under_way(engine):
    document = Document(engine)
    for _ in range(20):
        session = engine.create_session(SPEC, IDS)
        session.attention(0, document.sharp(), BUDGET)
        session.close()
    engine.drop("doc")
    engine.check_integrity()
