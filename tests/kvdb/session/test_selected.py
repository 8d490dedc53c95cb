"""A model that selects tokens itself is answered over exactly those, embedded and on a server."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdb
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import LayerError, PositionError, ShapeError
from kvdb.server.serve import Server
from tests.reference import relative_error

TOP = 24
LAYER = kvdb.Attention(6, 1, 24, 16, values="keys", indexer=kvdb.Indexer(heads=3, dim=8, top=TOP))
SPEC = kvdb.ModelSpec("selects", layers=[kvdb.Attention(2, 2, 8), LAYER], dtype="float32")
CONFIG = Config(storage=StorageConfig(block_size=16, arena_bytes=1 << 20))


def numbers(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def expected(q, k, keys, index_q, weights):
    """In float64, of the last n tokens: the answers, and the positions of each."""
    n, tokens, answers, positions = q.shape[1], k.shape[1], [], []
    scores = np.einsum("hnt,hn->nt", np.maximum(index_q.astype(np.float64) @ keys[0].T.astype(np.float64), 0), weights)
    for i in range(n):
        seen = scores[i, : tokens - n + i + 1]
        chosen = np.sort(np.argsort(-seen, kind="stable")[:TOP])
        logits = 24**-0.5 * q[:, i].astype(np.float64) @ k[0, chosen].T.astype(np.float64)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        answers.append(shares / shares.sum(axis=1, keepdims=True) @ k[0, chosen, :16])
        positions.append(chosen)
    return np.stack(answers, axis=1), positions


@pytest.fixture(params=["embedded", "served"])
def db(request):
    with Database(CONFIG) as engine:
        server = Server(engine, ServerConfig(port=0))
        server.start()
        with kvdb.connect(server.target) if request.param == "served" else kvdb.connect(config=CONFIG) as db:
            yield db
        server.stop(grace=0)


def test_what_the_indexer_selects_is_attended_and_nothing_else(db):
    rng, n = np.random.default_rng(1), 100
    k, keys, other = numbers(rng, 1, n + 8, 24), numbers(rng, 1, n + 8, 8), numbers(rng, 2, n, 8)
    db.import_context(SPEC, range(n), [(other, other), (k[:, :n], None, keys[:, :n])], name="a")
    with db.create_session(SPEC, range(n)) as session:
        at = n
        for step in (1, 1, 4, 2):
            end = at + step
            q, index_q, weights = numbers(rng, 6, step, 24), numbers(rng, 3, step, 8), numbers(rng, 3, step)
            session.update_indexer(1, keys[:, at:end], start=at)
            out = session.attend_selected(1, q, k[:, at:end], None, index_q, weights, start=at)
            right, _ = expected(q, k[:, :end], keys[:, :end], index_q, weights)
            assert out.shape == right.shape == (6, step, 16)
            assert relative_error(out, right) < 1e-5
            again = session.attend_selected(1, q, None, None, index_q, weights)
            assert (again == out).all()
            at = end
        told = str(session.explain(1, analyze=True)) if session.stats().queries else ""
        assert f"selects {TOP} of {n + 8}" in told
        assert f"attended {TOP} tokens, missed" in told
        assert session.stats().rules["trained"] == 8
        whole = session.attention(1, q)
        assert relative_error(whole, out) > 1e-3


@given(st.integers(0, 40), st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 1 << 30))
@settings(max_examples=30)
def test_any_selection_is_that_of_the_model(stored, pieces, seed):
    rng = np.random.default_rng(seed)
    total = stored + sum(pieces)
    k, keys = numbers(rng, 1, total, 24), rng.integers(-2, 3, (1, total, 8)).astype(np.float32)  # many scores are equal
    other = numbers(rng, 2, total, 8)
    with kvdb.connect(config=CONFIG) as db:
        if stored:
            kv = [(other[:, :stored], other[:, :stored]), (k[:, :stored], None, keys[:, :stored])]
            db.import_context(SPEC, range(stored), kv, name="a")
        with db.create_session(SPEC, range(stored)) as session:
            at = stored
            for n in pieces:
                q, index_q = numbers(rng, 6, n, 24), rng.integers(-2, 3, (3, n, 8)).astype(np.float32)
                weights = rng.integers(0, 3, (3, n)).astype(np.float32)
                session.update_indexer(1, keys[:, at : at + n])
                out = session.attend_selected(1, q, k[:, at : at + n], None, index_q, weights)
                at += n
                right, positions = expected(q, k[:, :at], keys[:, :at], index_q, weights)
                assert relative_error(out, right) < 1e-5
                assert (session._transport._layers[1].selected.positions == positions[-1]).all()


def test_a_call_that_cannot_be_appends_nothing(db):
    rng = np.random.default_rng(2)
    q, k, index_q, weights = numbers(rng, 6, 1, 24), numbers(rng, 1, 1, 24), numbers(rng, 3, 1, 8), numbers(rng, 3, 1)
    with db.create_session(SPEC, [1]) as session:
        with pytest.raises(PositionError, match="indexer of layer 1"):
            session.attend_selected(1, q, k, None, index_q, weights)
        session.update_indexer(1, numbers(rng, 1, 1, 8))
        with pytest.raises(LayerError, match="layer 0 of selects has no indexer"):
            session.attend_selected(0, numbers(rng, 2, 1, 8), numbers(rng, 2, 1, 8), numbers(rng, 2, 1, 8), index_q, weights)
        with pytest.raises(ShapeError, match="weights of the indexer of layer 1"):
            session.attend_selected(1, q, k, None, index_q, weights[:2])
        with pytest.raises(PositionError, match="start"):
            session.attend_selected(1, q, k, None, index_q, weights, start=4)
        assert session.attend_selected(1, q, k, None, index_q, weights, start=0).shape == (6, 1, 16)
