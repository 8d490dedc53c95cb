"""EXPLAIN ANALYZE, embedded and remote: its figures beside the oracle's."""

import numpy as np
import pytest

import indexes.registry as registry
import kvdb
from kvdb.errors import InvalidArgument
from tests.kvdb.attention.test_sparse import GivesUp
from tests.query_optimizer.conftest import N
from tests.reference import attention, relative_error

ALPHA = 0.05


def oracle(document, layer, end, alpha):
    """Dense attention of the last query, and the share of the mass that Dipr leaves out beside the window."""
    kv, scale = document.kv, document.spec.softmax_scale
    q = document.q[layer][:, end - 1 : end]
    exact, _ = attention(q, kv.k[layer][:, :end], kv.v[layer][:, :end], scale)
    logits = scale * np.einsum("hnd,htd->hnt", q.astype(np.float64), kv.k[layer][:, :end].repeat(2, axis=0))[:, 0]
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    searched = (np.arange(end) >= 16) & (np.arange(end) < (N - 16) // 16 * 16)
    out = searched & (weights < alpha * weights.max(axis=-1, keepdims=True))
    return exact, np.where(out, weights, 0).sum(axis=-1).mean(), (~out).sum(axis=-1).mean()


@pytest.mark.usefixtures("scan_for_flat")
def test_its_figures_are_the_oracles_and_nothing_has_changed(document):
    document.db.build_index("doc", "flat")
    with document.open() as session:
        for at in range(N, N + 5):
            out = document.attend(session, 1, at, retrieval=kvdb.Dipr(ALPHA))
        before = session.stats()
        plan = session.explain(1, analyze=True, retrieval=kvdb.Dipr(ALPHA))
        assert session.stats() == before
        exact, missed, read = oracle(document, 1, N + 5, ALPHA)
        assert plan.outcome.missed_true == pytest.approx(missed, rel=1e-2)
        assert plan.outcome.missed_true <= plan.outcome.missed_bound
        assert plan.outcome.missed == pytest.approx(missed, rel=0.05)
        norms = np.linalg.norm(exact, axis=-1)
        assert plan.outcome.output_error == pytest.approx((np.linalg.norm(out - exact, axis=-1) / norms).mean(), rel=1e-2)
        assert plan.actual.tokens == pytest.approx(read, abs=0.5)
        assert plan.actual.tokens == pytest.approx(sum(access.actual.tokens for access in plan.accesses), abs=0.5)
        assert plan.actual.scanned == N + 5
        assert sum(access.actual.seconds for access in plan.accesses) > 0
        assert plan.actual.seconds > 0
        document.attend(session, 1, N + 5)


def test_a_plan_that_reads_everything_misses_nothing(document):
    with document.open() as session:
        out = document.attend(session, 0, N)
        plan = session.explain(0, analyze=True)
        exact, _, _ = oracle(document, 0, N + 1, ALPHA)
        assert relative_error(out, exact) <= 1e-5
        assert (plan.outcome.missed, plan.outcome.missed_bound) == (0, 0)
        assert plan.outcome.missed_true == pytest.approx(0, abs=1e-6)
        assert plan.outcome.output_error == pytest.approx(0, abs=1e-6)
        assert plan.actual.tokens == N + 1
        assert plan.actual.nbytes == (N + 1) * document.spec.token_nbytes


def test_before_the_first_query_there_is_nothing_to_analyze(document):
    with document.open() as session:
        before = session.stats()
        for layer in (0, 1):
            with pytest.raises(InvalidArgument, match=f"layer {layer} has seen no query to analyze; ask one"):
                session.explain(layer, analyze=True)
        document.attend(session, 0, N)
        assert session.explain(0, analyze=True).actual
        with pytest.raises(InvalidArgument, match="layer 1 has seen no query"):
            session.explain(1, analyze=True)
        assert session.stats().queries == before.queries + 1
    with pytest.raises(InvalidArgument, match="has seen no query"):
        document.db.explain("short", 0, analyze=True)


def test_heads_that_an_index_gave_up_are_told(document, monkeypatch):
    monkeypatch.setattr(GivesUp, "heads", (1,))
    monkeypatch.setattr(registry, "KINDS", {**registry.KINDS, "flat": GivesUp})
    document.db.build_index("doc", "flat")
    with document.open() as session:
        document.attend(session, 1, N, retrieval=kvdb.TopK(5))
        plan = session.explain(1, analyze=True, retrieval=kvdb.TopK(5))
    (search,) = (access for access in plan.accesses if access.index)
    assert search.actual.left_heads == 1
    assert search.actual.tokens == 5
    assert "Gave Up: on 1 of 2 KV heads, which were read whole" in str(plan)
    whole, window = search.tokens, N + 1 - search.tokens
    assert plan.actual.tokens == pytest.approx(window + whole / 2 + 5 / 2)
    assert 0 < plan.outcome.missed_true <= plan.outcome.missed_bound


@pytest.mark.usefixtures("scan_for_flat")
def test_a_query_that_wants_everything_reads_it_and_says_so(document):
    document.db.build_index("doc", "flat")
    with document.open() as session:
        document.attend(session, 1, N, retrieval=kvdb.TopK(N))
        plan = session.explain(1, analyze=True, retrieval=kvdb.TopK(N))
        assert plan.gave_up
        assert "  Gave Up: so much was wanted that everything was read\n" in str(plan)
        assert plan.outcome.output_error == pytest.approx(0, abs=1e-6)
        assert not session.explain(1, analyze=True, retrieval=kvdb.TopK(1)).gave_up
        assert not session.explain(1, analyze=True, retrieval=kvdb.Exact()).gave_up


@pytest.mark.usefixtures("scan_for_flat")
def test_behind_a_context_the_kept_queries_are_searched_too(document):
    """There is no tail yet, and the plan is carried out as it stands."""
    document.db.build_index("doc", "flat")
    for layer, plan in enumerate(document.db.explain("doc", analyze=True, retrieval=kvdb.Dipr(ALPHA))):
        assert plan.layer == layer
        (search,) = (access for access in plan.accesses if access.index)
        assert 0 < search.actual.tokens < N / 2
        assert plan.actual.tokens < N / 2
        assert 0 < plan.outcome.missed_true <= plan.outcome.missed_bound


@pytest.mark.usefixtures("scan_for_flat")
def test_a_query_right_behind_what_is_stored_is_searched(document):
    document.db.build_index("doc", "flat")
    with document.open() as session:
        out = session.attention(0, document.q[0][:, N - 1 : N], retrieval=kvdb.Dipr(1e-4))
        assert session.stats().tokens_retrieved < N
        exact, _, _ = oracle(document, 0, N, ALPHA)
        assert relative_error(out, exact) <= 0.05
        several = session.attention(0, document.q[0][:, N - 3 : N], retrieval=kvdb.Dipr(1e-4))
        assert relative_error(several[:, -1:], exact) <= 0.05
